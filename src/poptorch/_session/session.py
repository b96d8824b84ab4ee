"""Run one wrapped model: decides in which order it is compiled, attached, called, changed and
detached. Every public method holds its lock.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _capture, _compile
from .._base import interrupts, log, processes, source
from .._base.errors import AssertionFailure, Error, described
from .._base.process_settings import release_freed_memory
from .._base.resources import collecting_rarely
from .._base.user_modes import on_host, without_user_modes
from .._ir.spec import Spec
from .._ir.symbolic import Excluded, NotSymbolic
from .._ir.tensors import Tensors
from .._residency import Event, locked
from ..backends.protocol import unsuitable
from ..enums import ConnectionType
from ..ops.blocks import remember_compiled
from . import forks, hooks, injected_faults, wrapping
from .bound_call import BoundCall, Done
from .calls import (
    Arguments,
    BoundArguments,
    Inputs,
    LastCall,
    Share,
    VaryingSizes,
    check_results,
    is_shorter,
    join_results,
    shapes_of,
    shares_of,
    unequal_share,
    why_fixed,
)
from .host_changes import (
    array_check,
    decision_check,
    default_type_checks,
    seed_checks,
    structure_checks,
)
from .optimizer import SessionOptimizer
from .programs import CallMode, Model, Programs, Specialization, Task, check_saved, paths_of
from .random import Randomness
from .reports import Reports, check_report_settings
from .reserved_chips import Chips
from .weights import DEVICE_ONLY, StateLayout, StateStore, Transfers

# What the next compilation continues with after loading a file: state without a host tensor, by
# key, and the random state, which is None for a new sequence.
Restored = tuple[Mapping[str, torch.Tensor], list[int] | None]
_OF_SIZES = 4  # programs for inputs that differ in sizes alone, if no option sets a number
RECENT = 8
"""The number of latest calls whose times are used, so that times of the interpreter are
soon dropped.
"""
ProgressBar = Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]]


class Session:
    """The runtime of one wrapped model. Public methods hold its lock.

    ``owner`` returns the executor, or None after its deletion. ``progress`` returns a context in
    which a compilation reports its progress.
    """

    def __init__(
        self,
        model: Model,
        settings: Callable[[], Spec],
        optimizer: torch.optim.Optimizer | None,
        owner: Callable[[], wrapping.Owner | None],
        progress: ProgressBar,
    ) -> None:
        self.model, self.programs = model, Programs()
        trains = optimizer is not None
        self.weights = Transfers(model.module, trains, self.programs, owner)
        self.lock = self.weights.lock
        self._owner, self._wraps = owner, False  # a model that was destroyed is not wrapped
        self.optimizer = SessionOptimizer(optimizer, self.lock) if optimizer is not None else None
        model.freeze = self.optimizer.frozen if self.optimizer is not None else None
        self.reports = Reports(model)
        self.random = Randomness(0)
        # State without a host tensor, by key, while the model is detached.
        self.kept: Mapping[str, torch.Tensor] | None = None
        self.restored: Restored | None = None
        self.whole: Arguments | None = None  # placeholders of a file, with as many rows as usual
        self.last: LastCall | None = None
        self.took = deque[float](maxlen=RECENT)  # seconds of the latest calls of a program
        self._spec: Spec  # all programs are compiled with these settings
        self._bound: BoundCall | None = None  # the last call
        # The inputs of the first program. Shorter batches get micro-batches of the same size.
        self._usual: Inputs | None = None
        self.settings, self._progress = settings, progress
        self.sizes = VaryingSizes()
        # Whether sizes vary although no option allows several programs, and whether they just began
        # to, so that they are refused if one program cannot serve them all.
        self._varies, self._begins_to_vary = False, False
        self._chips = Chips()
        self._forks = processes.forks  # number of forks before the process that uses the model

    @property
    def now(self) -> Specialization:
        """Return the program that calls use."""
        return self.programs.now

    def wrap(self) -> None:
        """Wrap the user's module for training, unless it is wrapped. Another executor may have
        wrapped it since.
        """
        owner = self._owner()
        if self.optimizer is not None and owner is not None and not self._wraps:
            wrapping.refuse_wrapped(self.model.users)
            wrapping.wrap(self.model.users, owner, self.model.module)
            self._wraps = True

    # Compiling.

    @locked
    @collecting_rarely()
    def compile(
        self, arguments: Arguments, background: bool = False, placeholders: bool = False
    ) -> None:
        """Compile the first program. With ``background``, optimised code may follow later.

        If this fails, nothing changes.
        """
        self.wrap()
        self._forks = forks.check(self._forks, bool(self.programs.all))
        bound = self.model.signature.bind(arguments)
        self.weights.fetch()
        spec = self.settings()
        log.limit_repeats(spec.runtime.max_repeat_logs)
        check_report_settings(spec)
        try:
            task = self.model.task(bound, spec, placeholders)
            self._begin(self._compiled(task, background))
        except BaseException:
            self._chips.release()
            raise
        if spec.runtime.connection != ConnectionType.Never:
            self._attach()
        self.reports.compiled(self.now)

    def _compiled(
        self, task: Task, background: bool, earlier: _compile.EarlierProgram | None = None
    ) -> Specialization:
        """Compile; ``earlier``: for symbolic sizes, the program that differs in sizes alone."""
        spec = task.spec

        def placed(count: int) -> None:
            injected_faults.check("compile")
            if spec.runtime.connection == ConnectionType.Always:
                self._chips.acquire(spec, count)

        excludes = source.excluding(spec.runtime.source_excludes)
        mode, as_recorded = self.model.in_mode(), torch.autocast("cpu", enabled=False)
        with (
            interrupts.delivering(),
            self._progress() as progress,
            hooks.around(),
            excludes,
            mode,
            as_recorded,
            on_host(),
        ):
            compiled = _compile.compile(
                task.request,
                spec,
                task.optim,
                progress,
                placed,
                background,
                {key: repr(value) for key, value in task.hypers.items()},
                None if self.optimizer is None else self.optimizer.in_eager(task.hypers),
                task.remainder,
                earlier,
            )
        # After capturing, because a forward that sets modes or attributes itself has set them then.
        tensors, micro = task.reading.tensors, compiled.micro
        constants = {id(each): each for each in (*micro.constants.values(), *micro.read)}
        change_checks = [
            *structure_checks(
                self.model.module, self.model.users, self.model.wrapped_forward, tensors
            ),
            decision_check(micro.decided, tensors),
            *default_type_checks(micro.graph, micro.constants.values()),
            *seed_checks(compiled.plan.program.graphs.values(), spec.target.seed),
            *task.attributes.checks(constants.values()),
            array_check(task.inputs.bound.constants),
        ]
        return Specialization(task, self.model.follow_mode(), compiled, change_checks)

    def _begin(self, variant: Specialization) -> None:
        """Use the first program, without attaching to a device."""
        random = Randomness(variant.spec.target.seed, variant.spec.runs_together)
        kept, state = self.restored or (None, None)
        if kept is not None:
            slots = variant.compiled.plan.program.visible_slots().items()
            own = {key: slot for key, slot in slots if slot.kind in DEVICE_ONLY}
            check_saved(
                {key: (value.shape, value.dtype) for key, value in kept.items()},
                {key: (own[key].device_shape, own[key].dtype) for key in kept if key in own},
            )
        random.set(state, None)
        if self.optimizer is not None:
            self.optimizer.compiled(variant.task)
        remember_compiled(variant, self.model.module)
        self.programs.all, self.random, self.kept, self.restored = [variant], random, kept, None
        self._spec, self.last, self._usual = variant.spec, None, variant.inputs
        self._varies = False
        self.took.clear()
        self.weights.begin()

    # Running.

    def run(self, arguments: Arguments) -> Any:
        """Make one call on the device and return the result of ``forward``. The caller holds the
        lock.

        If the first call fails, nothing changes.
        """
        started = time.perf_counter()
        if processes.forks:
            self._forks = forks.check(self._forks, bool(self.programs.all))
        call = self._bound
        if call is not None:
            tensors = call.tensors_of(arguments)
            if tensors is not None:
                return self._returned(call.run(tensors, tensors, started))
        return self._call(arguments) if self.programs.all else self._first_call(arguments)

    def _first_call(self, arguments: Arguments) -> Any:
        self.wrap()
        restored = self.restored
        try:
            whole = self._whole(arguments)
            self.compile(whole, background=True, placeholders=whole is not arguments)
            return self._call(arguments)
        except Exception:
            self._forget()
            self.restored = restored
            raise

    def _call(self, arguments: Arguments) -> Any:
        """Bind the call and run it. If no program takes the batch, run its shares."""
        try:
            call, prepared = self._bind(arguments)
        except Error as error:
            if not error.of_batch:
                raise
            # Its frames refer to the present program, and this one to it: a program that is
            # replaced, and its compilation in another process, would live until a collection.
            unlike = error.with_traceback(None)
        else:
            return self._returned(call.run(*prepared))
        parts = self._shares(arguments)
        if not parts or self._has_others(parts):
            try:
                call, prepared = self._bind_other_sizes(arguments, unlike)
            except Error as error:
                if not (parts and error.of_batch):
                    raise
            else:
                return self._returned(call.run(*prepared))
        return self._returned(self._run_shares(parts, unlike))

    def _bind_other_sizes(
        self, arguments: Arguments, unlike: Error
    ) -> tuple[BoundCall, tuple[Tensors, Tensors, float]]:
        """Bind a call whose inputs differ in sizes alone, although no option allows several
        programs.

        Raises:
            Error: one program cannot serve these sizes, too.
        """
        spec = self._spec
        if spec.runtime.programs or self._varies or why_fixed(spec) is not None:
            raise unlike
        now = self.programs.differing_in_sizes(self.model.follow_mode(), arguments)
        if now is None or not now.inputs.may_have_sizes_of(arguments):
            raise unlike
        self._varies = self._begins_to_vary = True
        try:
            bound = self._bind(arguments)
        except BaseException:
            self._varies = False
            raise
        finally:
            self._begins_to_vary = False
        inputs = bound[0].program.inputs
        log.python.warning(
            "The inputs differ in size from those of earlier calls. %s: %s. To accept this without "
            "a warning, call options.programs(2) before you wrap the model; to get an error "
            "instead, as in PopTorch, call options.programs(1)",
            (
                "From now on, one program serves all sizes"
                if inputs.symbols
                else "An additional program was compiled, for the sizes of this call only"
            ),
            inputs,
        )
        return bound

    @property
    def _count(self) -> int:
        """How many programs may be kept for one mode of the model."""
        return self._spec.runtime.programs or (_OF_SIZES if self._varies else 1)

    @property
    def _allows_other_sizes(self) -> bool:
        """Whether inputs of other sizes may get another program."""
        return self._count > 1

    def _bind(
        self, arguments: Arguments, share: Share | None = None
    ) -> tuple[BoundCall, tuple[Tensors, Tensors, float]]:
        """Find the program and prepare the inputs. Return the call and the arguments of its
        ``run``.
        """
        program = self._program_for(arguments, share)
        started = time.perf_counter()
        device = self.weights.device
        if device.near or device.stale:
            self.weights.fetch()
        given, batch = program.inputs.convert(arguments)
        call = self._bound = BoundCall(
            program, self.model, self.weights, self.optimizer, self.random, self.reports
        )
        return call, (given, batch, started)

    # Batches that are shorter than usual.

    def _whole(self, arguments: Arguments) -> Arguments:
        """Return the arguments for which the model is compiled first. If a run is resumed with a
        short batch, these are complete batches.
        """
        if self.whole is None:
            return arguments
        bind = self.model.signature.bind
        whole = bind(self.whole)
        bound, loops = bind(arguments, like=whole), self.settings().loops
        return self.whole if is_shorter(bound, whole, loops) else arguments

    def run_micro_batches(self, arguments: Arguments, each: Sequence[Arguments]) -> Any:
        """Run one update of a batch whose micro-batches, given by themselves, differ in size."""
        bound = [self.model.signature.bind(own) for own in each]
        return self._returned(self._run_shares([(unequal_share(bound), arguments)]))

    def _shares(self, arguments: Arguments) -> list[tuple[Share, Arguments]]:
        """Divide a batch that no program takes as a whole into parts, each with its share. The list
        is empty if this is not possible.
        """
        usual, programs = self._usual, self._spec.runtime.programs
        signature = self.model.signature
        if usual is None or programs == 1:
            return []
        bound = signature.bind(arguments, like=usual.bound)
        if not programs and not is_shorter(bound, usual.bound, self._spec.loops):
            return []
        return [
            (share, signature.assemble(signature.given(part)))
            for share, part in shares_of(bound, usual, self._spec)
        ]

    def _has_others(self, parts: Sequence[tuple[Share, Arguments]]) -> bool:
        """Return whether a batch of another size was shorter, too, and this one has no program.

        Sizes then vary in more than the last batch of an epoch, and one program can serve all.
        """
        mode = self.model.follow_mode()
        shares = [each.share for each in self.programs.all if each.share and each.mode == mode]
        is_single = self._spec.loops.micro_batches == 1
        return is_single and bool(shares) and all(share not in shares for share, _ in parts)

    def _run_shares(
        self, parts: Sequence[tuple[Share, Arguments]], unlike: Error | None = None
    ) -> Done:
        """Run one share after another; afterwards the program of whole batches is used again.

        ``unlike``: what to report if torch cannot run ``forward`` with these sizes.
        """
        usual, done = self.programs.all[-1], list[Done]()
        mode = self.model.follow_mode()
        try:
            for share, arguments in parts:  # all are there before the first one runs
                now = self.programs.find(mode, arguments, share)
                try:
                    now = now or self._program_for(arguments, share)
                except RuntimeError as error:
                    if unlike is None or isinstance(error, Error):
                        raise
                    raise unlike from error
                check_results(usual.emitted(), now.emitted())
            for share, arguments in parts:
                call, prepared = self._bind(arguments, share)
                done.append(call.run(*prepared))
        finally:
            if self.programs.all and self.programs.all[-1] is not usual:
                self._switch_to(usual)
        results = join_results([results for _, results, _ in done], usual.emitted())
        return done[-1][0], results, (*done[0][2][:2], done[-1][2][2])

    def _returned(self, done: Done) -> Any:
        """Return the result of ``forward``."""
        now, results, (started, taken, ready) = done
        outputs = now.outputs
        returned = outputs.build(results[: outputs.count])
        ended = time.perf_counter()
        moments = started, taken, ready, ended
        self.last = moments, now.anchors(results) if now.has_anchors else {}
        self.took.append(ended - started)
        if now.is_reported:
            self.reports.called(now, moments)
        return returned

    def _program_for(self, arguments: Arguments, share: Share | None) -> Specialization:
        """Attach, and use the program for the model's mode and these arguments."""
        if self.weights.store is None:
            self._check_online(
                "Trying to run a model on an offline device",
                "save it with compileAndExport(path) and run poptorch.load(path) elsewhere, or use "
                "ConnectionType.Always",
            )
            self._attach()
        if self.optimizer is not None and self.optimizer.prepare_run():
            self._compile_again(arguments)
        now, mode = self.programs.all[-1], self.model.follow_mode()
        if now.inputs.symbols and (why := unsuitable(now.compiled.executable)) is not None:
            self.sizes.reasons[frozenset(now.inputs.symbols)] = why
            now.inputs.retire()
        may_differ = self._allows_other_sizes or share is not None
        other = mode != now.mode or share != now.share
        if other or (may_differ and not now.inputs.takes(arguments)):
            now = self._change_program(now, mode, arguments, share)
        return now

    # Several programs.

    def _change_program(
        self, now: Specialization, mode: CallMode, arguments: Arguments, share: Share | None
    ) -> Specialization:
        """Use the program for another mode or other inputs. All programs share weights and
        state.
        """
        variant = self.programs.find(mode, arguments, share)
        if variant is None:
            if mode != now.mode:
                log.python.info(
                    "train(), eval() or autocast changed the mode: compiling for the new mode"
                )
            variant = self._new_variant(now, arguments, share)
            if share is not None:
                log.python.info("A program was compiled for a shorter batch: %s", variant.inputs)
            elif mode == now.mode:
                log.python.info(
                    "Options.programs: an additional program was compiled for %s", variant.inputs
                )
        self._switch_to(variant)
        return variant

    def _switch_to(self, variant: Specialization) -> None:
        with interrupts.deferred(), without_user_modes():
            if self.optimizer is not None and not variant.reading.has_tensors_of(self.now.reading):
                self.optimizer.detach()
                self.optimizer.compiled(variant.task)
            self._move(variant, restored=True)
            self.programs.use(variant, self._count)

    def _compile_again(self, arguments: Arguments) -> None:
        """Use a new program for the changed optimizer. Weights and all state are kept."""
        log.python.info(
            "The structure of the optimizer changed. The program is compiled "
            "again, and the optimizer state is kept"
        )
        variant = self._new_variant(self.now, arguments)
        assert self.optimizer is not None
        with interrupts.deferred(), without_user_modes():
            self.optimizer.detach()
            self.optimizer.compiled(variant.task)
            self._move(variant, restored=False)
            self.programs.all = [variant]

    def _move(self, variant: Specialization, restored: bool) -> None:
        """Replace the present store by that of another program, with the present state."""
        has_others = not variant.reading.has_tensors_of(self.now.reading)
        store = self.weights.store_for(variant)
        if self.optimizer is not None:
            self.optimizer.attach(store, restored)
        self.weights.store = store
        if has_others:
            self.weights.periodic_checks.adopted()

    def _new_variant(
        self, now: Specialization, arguments: Arguments, share: Share | None = None
    ) -> Specialization:
        bound = self.model.signature.bind(arguments, like=now.inputs.bound)
        if share is None and not self._allows_other_sizes:
            now.inputs.convert(arguments)
        self.weights.fetch()
        self.weights.bring_down()
        variant = None if share is not None else self._for_all_sizes(bound, arguments)
        if variant is None:
            task = self.model.task(bound, self._spec, share=share)
            variant = self._compiled(task, background=True)
        if share is None and self._allows_other_sizes and variant.reason is None:
            variant.reason = why_fixed(self._spec)
        remember_compiled(variant, self.model.module)
        return variant

    def _for_all_sizes(self, bound: BoundArguments, arguments: Arguments) -> Specialization | None:
        """Compile one program for all sizes, if only sizes differ from an earlier program's.

        Otherwise compile one for these sizes, or return None if that was not tried.
        """
        spec = self._spec
        if not self._allows_other_sizes:
            return None
        mode = self.model.follow_mode()
        earlier = self.programs.differing_in_sizes(mode, arguments)
        if self._varies:
            self._check_kind(bound, arguments)
        if earlier is None:
            return None
        before, now = earlier.inputs.shapes, shapes_of(bound.tensors)
        symbols = self.sizes.symbols(spec, before, earlier.inputs.symbols, now)
        if not symbols:
            return None
        reason = self.sizes.reasons.get(frozenset(symbols))
        if reason is None:
            known = _compile.EarlierProgram(earlier.compiled.micro, earlier.inputs.slots())
            try:
                task = self.model.task(bound, spec, symbols=symbols)
                if self._varies and self._usual is not None:
                    task.inputs.whole = self._usual.shapes
                return self._compiled(task, True, known)
            except Excluded as error:
                variant = self._compiled(self.model.task(bound, spec), background=True)
                variant.reason = str(error)
                return variant
            except NotSymbolic as error:
                reason = str(error)
            except Exception as error:  # if symbols are not the reason, numbers fail, too
                reason = _without_symbolic_form(error)
        self.sizes.reasons[frozenset(symbols)] = reason
        if self._begins_to_vary:
            earlier.inputs.reason = reason
            earlier.inputs.convert(arguments)
        variant = self._compiled(self.model.task(bound, spec), background=True)
        variant.reason = reason
        say = log.python.warning if self._varies else log.python.info
        say(
            "Each size of the inputs needs its own program, because %s. Pad the inputs to a few "
            "sizes: poptorch.PadToSizes",
            reason,
        )
        return variant

    def _check_kind(self, bound: BoundArguments, arguments: Arguments) -> None:
        """Refuse inputs that differ in more than sizes, which no option allows, and those of
        shorter batches, whose micro-batches keep their size.
        """
        usual, inputs = self._usual, self.now.inputs
        assert usual is not None
        loops = self._spec.loops
        is_cut = loops.micro_batches > 1 and is_shorter(bound, usual.bound, loops)
        if is_cut or not inputs.differs_in_sizes(arguments):
            inputs.convert(arguments)

    # The device.

    @locked
    def attach(self) -> None:
        self._check_online(
            "Trying to attach to an offline device",
            "remove useOfflineIpuTarget and ConnectionType.Never from the options",
        )
        if self.weights.store is not None:
            raise Error(
                "Device is already attached",
                fix="remove this call, or make it only if isAttachedToDevice() returns False",
            )
        self._attach()

    def _check_online(self, title: str, fix: str) -> None:
        if self.now.spec.runtime.connection == ConnectionType.Never:
            raise AssertionFailure(title, got="ConnectionType.Never", fix=fix)

    def _attach(self) -> None:
        injected_faults.check("attach")
        now, restored = self.now, self.kept is not None
        self._chips.acquire(now.spec, now.compiled.plan.layout.reserved)
        weights = self.weights
        has_agreed = weights.has_agreed or not now.spec.runs_together
        with interrupts.deferred(), without_user_modes(), contextlib.ExitStack() as undo:
            undo.callback(weights.device.clear)
            store = StateStore(now.compiled, now.reading, weights.device, agreed=has_agreed)
            for key, value in (self.kept or {}).items():
                store.write(key, value)
            if self.optimizer is not None:
                undo.callback(self.optimizer.release)
                self.optimizer.attach(store, restored)
            self.random.start(store.state, restored)
            weights.attach(now, store)
            self.kept = None
            undo.pop_all()
        if not has_agreed:
            store.agree(now.spec.runtime.broadcast_weights)
            weights.has_agreed = True
            weights.device.updated(Event.UPDATE, store.written)

    @locked
    def detach(self) -> None:
        """Save the state that exists only on the device, and release the device."""
        self.programs.require_one()
        if self.weights.store is None:
            raise Error(
                "Device is not attached",
                fix="remove this call, or make it only if isAttachedToDevice() returns True",
            )
        self._detach()

    def _detach(self, local_only: bool = False) -> None:
        # The garbage collector may call this while another model is captured.
        with interrupts.deferred(), without_user_modes():
            store = self.weights.store
            if store is not None:
                self.weights.save(local_only)
                kept = store.device_only(leaving=True)
                if self.optimizer is not None:
                    self.optimizer.detach(local_only, kept)
                # Nothing below can fail: if something fails above, the device is already released.
                self.random.leave(store.state)
                self.weights.leave()
                self.kept, self._bound = kept, None
        self._chips.release()

    @locked
    def close(self, local_only: bool = False) -> None:
        """Update the host, remove the programs, release the device, and unwrap the module.

        With ``local_only``, exchange nothing with other processes, because they may have ended.
        """
        self.reports.finish()
        self._detach(local_only)
        if self.optimizer is not None:
            self.optimizer.spec = None
        self._remove_programs()
        self.last = self.kept = None
        release_freed_memory()
        if self._wraps:
            self._wraps = False
            wrapping.unwrap(self.model.users)

    def _forget(self) -> None:
        """Remove the programs, the device, and the state on it."""
        if self.optimizer is not None:
            self.optimizer.forget()
        self._chips.release()
        self._remove_programs()
        self.weights.begin()

    def _remove_programs(self) -> None:
        self.programs.all, self._bound = [], None

    # Optimizer, random numbers, state.

    @locked
    @without_user_modes()
    def set_optimizer(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Use another optimizer, or the same one with other values, and write the values to the
        device.
        """
        if self.optimizer is None:
            raise AssertionFailure(
                "setOptimizer needs a model that is wrapped for training",
                got="a model that is wrapped for inference",
                fix="call setOptimizer on the wrapped model that poptorch.trainingModel returned",
            )
        paths = self.now.reading.paths if self.programs.all else {}
        # The user may have assigned other tensors.
        paths |= paths_of(_capture.tensors_of(self.model.module, values=False))
        self.optimizer.adopt(optimizer, paths, relaxed)

    @locked
    @without_user_modes()
    def state_to_save(self) -> Mapping[str, torch.Tensor]:
        """Return state without a host tensor, by key: from the device, or what was kept.

        If processes have parts of the state, all of them must call this.
        """
        plan, store, kept = self.now.compiled.plan, self.weights.store, self.kept or {}
        if self.optimizer is not None:
            kept = self.optimizer.before_save(kept)
        if self.optimizer is not None and (plan.program.shards or plan.spec.target.parts > 1):
            self.optimizer.read()
        kept = store.device_only() if store is not None else kept
        layout = store.layout if store is not None else StateLayout(plan)
        own = {key: value for key, value in kept.items() if key not in layout.flat}
        own = {**own, **layout.gathered(kept)} if kept else own
        slots = plan.program.visible_slots()  # a file contains the state of one program
        return {key: value for key, value in own.items() if key in slots}

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device, or the state that is kept for the device."""
        with self.lock(), without_user_modes():
            self.programs.require_one()
            store = self.weights.store
            return self.random.get(store.state if store is not None else None)

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        with self.lock(), without_user_modes():
            self.programs.require_one()
            store = self.weights.store
            self.random.set(state, store.state if store is not None else None)


def _without_symbolic_form(error: Exception) -> str:
    """Return why a program for all sizes could not be made, in one line."""
    title, *rest = described(error).splitlines()  # torch adds its C++ stack
    got = next((line.partition("Got:")[2] for line in rest if "Got:" in line), "")
    what_failed = f"{title}: {got.strip()}" if got else title
    line = source.raising_line(error)
    where = f", in {line}" if line else ""
    return f"torch cannot trace forward with symbolic sizes ({what_failed}){where}"
