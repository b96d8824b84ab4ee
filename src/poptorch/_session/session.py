"""One wrapped model: its lock, programs, device, optimizer and random stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .. import _capture, _compile, _pod, _systems, backends
from .._base import env, interrupts, log, processes, source
from .._base.errors import AssertionFailure, Error, StateError
from .._compile import agreement
from .._ir.plan import Plan
from .._ir.slots import Kind, type_text
from .._ir.spec import Spec
from .._residency import Device, Event, unwatched
from ..enums import ConnectionType
from ..ops.blocks import remember_compiled
from . import faults, guards, hooks, reporting
from .counters import KEYS, LastCall, Stamps
from .inputs import dividing, return_inputs
from .mistakes import LossWatch
from .model import Model, Situation, Task, Variant
from .optimizer import SessionOptimizer
from .pricing import Captures
from .random import Randomness
from .store import DEVICE_ONLY, Layout, StateStore
from .weights import check_saved
from .wrapping import Owner

CHECK_EVERY = 0.02
"""Seconds from one look at the guards to the next: the layers of a small model are not in the
processor's caches when its call begins, and looking at all of them took 40 of its 650 us."""
TILES = {kind.generation: kind.tiles for kind in _systems.KINDS.values()}

Progress = Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]]
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """State from a file that the next compilation continues with."""

    device: Mapping[str, torch.Tensor]  # what no host tensor mirrors, by key
    random: list[int] | None  # None for a new sequence


def _locked(
    method: Callable[Concatenate[Session, P], R],
) -> Callable[Concatenate[Session, P], R]:
    """Let a method hold the lock: what a thread sees is the state between two calls."""

    @functools.wraps(method)
    def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.lock.run(method, self, *args, **kwargs)

    return call


class Session:
    """The runtime of one wrapped model; public methods hold its lock.

    ``owner`` returns the executor, or None once it is gone; ``progress`` makes the context in
    which a compilation reports its progress.
    """

    def __init__(
        self,
        model: Model,
        settings: Callable[[], Spec],
        optimizer: torch.optim.Optimizer | None,
        owner: Callable[[], Owner | None],
        progress: Progress,
    ) -> None:
        own = weakref.ref(self)
        self.device = Device(lambda: _bring_up_to_date(own()))
        hosts = (tied.tensor for tied in _capture.tensors_of(model.module).values())
        self.device.meet(hosts, optimizer is not None)
        self.lock = self.device.lock
        self.is_trainer = False  # a model that was let go of is none any more
        self.model = model
        self.optimizer = SessionOptimizer(optimizer, self.lock) if optimizer is not None else None
        self._freeze = self.optimizer.frozen if self.optimizer is not None else None
        self.reports = reporting.Reports(model, self._freeze)
        self.variants: list[Variant] = []  # the present one last
        self.store: StateStore | None = None  # while attached
        self.random = Randomness(0)
        self._weights = guards.of_weights(self.device, model.module)
        # State that no host tensor mirrors, by key, while detached.
        self.kept: Mapping[str, torch.Tensor] | None = None
        self.restored: Restored | None = None
        self.last: LastCall | None = None
        self._losses = LossWatch()
        self._next_check = 0.0  # of the guards; at once where somebody has looked at the weights
        self._spec: Spec  # every program is compiled with these settings
        self._settings, self._owner, self._progress = settings, owner, progress
        self._lease: _pod.Lease | None = None
        self._has_chips = False
        self._process = processes.forks
        self._agreed = False  # the processes of a job have begun with the same weights
        self._taking_over = self._is_copying = self._told_dropped = False
        self._written: Mapping[str, str] | None = None  # digests, since processes compared theirs
        self._left: Mapping[str, str] | None = None  # digests of the host's when detached

    @property
    def is_compiled(self) -> bool:
        return bool(self.variants)

    @property
    def now(self) -> Variant:
        """The program that calls use."""
        variants = self.variants  # which another thread may replace
        if not variants:
            raise Error(
                "The model has not been compiled or has been destroyed",
                fix="call the model, or its compile() method, with example inputs first",
            )
        return variants[-1]

    def state_lines(self) -> list[str]:
        """Say what is compiled, for which inputs, and who has the newest weights."""
        bound = self.now.inputs.bound
        inputs = (
            f"{path} {type_text(tensor.dtype, tensor.shape)}"
            for path, tensor in zip(bound.paths, bound.tensors, strict=True)
        )
        newer = ", its weights are newer than the module's" if self.device.newer else ""
        return [
            f"compiled, {self.now.compiled.executable.report().tier}",
            f"inputs: {', '.join(inputs)}",
            f"device: {'attached' if self.attached else 'detached'}{newer}",
            "print(executor.plan()) shows the program",
        ]

    @property
    def attached(self) -> bool:
        return self.store is not None

    # Compiling.

    @_locked
    def compile(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        background: bool = False,
        placeholders: bool = False,
    ) -> None:
        """Compile the first program; ``background``: optimised code may come later.

        A failure leaves everything as it was.
        """
        self._check_process()
        bound = self.model.signature.bind(args, kwargs)
        self.fetch()
        spec = self._settings()
        log.limit_repeats(spec.runtime.max_repeat_logs)
        reporting.check(spec)
        try:
            task = self.model.task(bound, spec, self._freeze, placeholders)
            self._begin(self._compiled(task, background))
        except BaseException:
            self._release_chips()
            raise
        if spec.runtime.connection != ConnectionType.Never:
            self._attach()
        self.reports.compiled(self.now)

    def _compiled(self, task: Task, background: bool) -> Variant:
        spec = task.spec
        excludes = source.excluding(spec.runtime.source_excludes)
        with self._progress() as progress, hooks.around(), excludes, self.model.in_mode():
            compiled = _compile.compile(
                task.request,
                spec,
                task.optim,
                progress,
                lambda count: self._placed(spec, count),
                background,
                {key: repr(value) for key, value in task.hypers.items()},
            )
        # After capturing: a forward that sets modes or attributes itself has set them by now.
        tensors, constants = task.reading.tensors, compiled.micro.constants.values()
        rows = [
            *guards.of_model(
                self.model.module, self.model.users, self.model.wrapped_forward, tensors
            ),
            guards.of_decisions(compiled.micro.decided, tensors),
            *guards.of_seed(compiled.plan.program.graphs.values()),
            *task.attributes.guards(constants),
            guards.of_arrays(task.inputs.bound.constants),
        ]
        return Variant(task, self._mode(), compiled, rows)

    def _begin(self, variant: Variant) -> None:
        """Use the first program, without attaching."""
        random, kept = Randomness(variant.spec.target.seed, variant.spec.runs_together), None
        if self.restored is not None:
            kept = self.restored.device
            slots = variant.compiled.plan.program.visible_slots().items()
            own = {key: slot for key, slot in slots if slot.kind in DEVICE_ONLY}
            check_saved(
                {key: (value.shape, value.dtype) for key, value in kept.items()},
                {key: (own[key].device_shape, own[key].dtype) for key in kept if key in own},
            )
            random.set(self.restored.random, None)
        if self.optimizer is not None:
            self.optimizer.compiled(variant.task)
        remember_compiled(variant, self.model.module)
        self.variants, self.random, self.kept, self.restored = [variant], random, kept, None
        self._agreed, self._spec = False, variant.spec
        self.device.clear()
        self.last = self._written = self._left = None

    def _placed(self, spec: Spec, count: int) -> None:
        faults.check("compile")
        if spec.runtime.connection == ConnectionType.Always:
            self._acquire_chips(spec, count)

    @_locked
    def plan(self) -> Plan:
        """Return the compiled plan, cut into stages; the cutting is done when first asked for.

        Replicas that exchange tensors run side by side, which stages do not.
        """
        now = self.now
        compiled = now.compiled
        side_by_side = compiled.micro.exchanging and compiled.plan.program.lanes is not None
        if compiled.plan.staged is None and not side_by_side:
            plan = _compile.with_stages(
                compiled.plan, compiled.micro, now.task.request, now.task.optim
            )
            compiled = dataclasses.replace(compiled, plan=plan)
        tier = compiled.executable.report().tier
        if compiled.plan.tier != tier:
            plan = dataclasses.replace(compiled.plan, tier=tier)
            compiled = dataclasses.replace(compiled, plan=plan)
        now.compiled = compiled
        return compiled.plan

    @_locked
    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _capture.Explanation:
        """List what a capture for arguments of this kind would refuse or freeze."""
        bound = self.model.signature.bind(args, kwargs)
        self.fetch()
        request = self.model.task(bound, self._settings(), self._freeze).request
        with self.model.in_mode():
            return _capture.explain(request)

    @_locked
    def captures(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captures:
        """Return what prices are made of; weights and arguments may be on the meta device."""
        bound = self.model.signature.bind(args, kwargs)
        self.fetch()
        return Captures(self.model, self._freeze, bound)

    @_locked
    def shares(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], chips: int, limit: int | None
    ) -> list[_compile.Share]:
        bound = self.model.signature.bind(args, kwargs)
        task = self.model.task(bound, self._settings(), self._freeze)
        with self.model.in_mode():
            return _compile.shares(task.request, task.spec, task.optim, chips, limit)

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do one call on the device and return what ``forward`` returns; the caller has the lock.

        A first call that fails leaves everything as if it had not been made.
        """
        self._check_process()
        if self.variants:
            return self._call(args, kwargs)
        restored = self.restored
        try:
            self.compile(args, kwargs, background=True)
            return self._call(args, kwargs)
        except Exception:
            self._forget()
            self.restored = restored
            raise

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        now = self._program_for(args, kwargs)
        started = time.perf_counter()
        if self.device.near or self.device.stale:
            self.fetch()
        given, batch = now.inputs.take(args, kwargs, self.model.signature)
        taken = time.perf_counter()
        results = self.reports.run(now.spec, self._execute, now, now.synthetic or batch)
        ready = time.perf_counter()
        if self.optimizer is not None:
            self._losses.look(now, results, self._attached_store().state.updates)
        if now.changed_inputs and now.synthetic is None:
            return_inputs(now.changed_inputs, given, batch)
        returned = now.outputs.build(results[: now.outputs.count])
        moments = (started, taken, ready, time.perf_counter())
        self.last = LastCall(moments, now.anchors(results))
        self.reports.called(now, self.last)
        return returned

    def _mode(self) -> Situation:
        """Return what there is a program each for."""
        casts = torch.is_autocast_enabled("cpu")
        return self.model.mode(), torch.get_autocast_dtype("cpu") if casts else None

    def _program_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
        """Attach, and go on with the program for the model's mode and these arguments."""
        if self.store is None:
            _refuse_offline(self.now.spec)
            self._attach()
        if self.optimizer is not None and self.optimizer.prepare_run():
            self._compile_again(args, kwargs)
        now, mode = self.variants[-1], self._mode()
        several = now.spec.runtime.programs > 1
        if mode != now.mode or (several and not now.takes(self.model, args, kwargs)):
            now = self._change_program(now, mode, args, kwargs)
        return now

    def _execute(self, now: Variant, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program: wholly, or leaving everything as after a whole update."""
        store, training = self._attached_store(), self.optimizer is not None
        self._check_guards(now)
        now.indices.check(batch, store.state)
        if self._written is not None:
            agreement.check_written(self._written)
            self._written = None
        before = store.state.updates
        with interrupts.deferred():
            undo = self.device.updated(Event.UPDATE if training else Event.COUNT, store.written)
            try:
                faults.check("run")
                run = now.compiled.executable.run
                if torch.is_autocast_enabled("cpu"):  # casts were recorded: once is enough
                    run = torch.autocast("cpu", enabled=False)(run)
                results = run(store.state, batch)
            except BaseException as error:
                if store.state.updates == before:  # nothing has happened
                    self.device.undo(undo)
                else:
                    self._ran(store.state.updates - before)
                better = now.indices.explain(error, batch, store.state)
                if better is error:
                    raise
                raise better from error
            self._ran(store.state.updates - before)
        return results

    def _check_guards(self, now: Variant) -> None:
        own = None if self.optimizer is None else self.optimizer.guard
        moment = time.monotonic()
        if moment >= self._next_check or not (own is None or own.told or own.holds()):
            unwatched(guards.check, [*now.guards, self._weights, *([own] if own else [])])
            self._next_check = moment + CHECK_EVERY

    def _ran(self, updates: int) -> None:
        self.random.has_run = True
        if self.optimizer is not None:
            self.optimizer.after_run(updates)

    def _check_process(self) -> None:
        process = processes.forks
        if process:
            _use_one_thread(process)
        if process == self._process:
            return
        if self.variants:
            raise StateError(
                "The model was compiled before this process was forked",
                got=f"process {os.getpid()}, and a wrapper that process {os.getppid()} or one "
                "before it has used",
                fix=(
                    "wrap the model in the new process",
                    "start processes with multiprocessing.get_context('spawn')",
                ),
            )
        self._process = process

    @_locked
    def counters(self) -> Stamps:
        """Return the time stamps of the last call in PopTorch's form.

        With synthetic data nothing travels: tensors have no stamps then.
        """
        if self.last is None:
            return {key: [[]] for key in KEYS}
        now = self.now
        loops, emit = now.spec.loops, now.compiled.plan.program.emit
        slots = [slot for slot in emit.slots if slot.kind is not Kind.ANCHOR]
        results, times = [emit.count(slot.key, loops) for slot in slots], loops.micro_batches
        if now.synthetic is not None:
            results, times = [0] * len(results), 0
        return self.last.counters(len(now.inputs.bound.paths), results, times)

    # Several programs.

    def _change_program(
        self, now: Variant, mode: Situation, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Variant:
        """Go on with the program for another mode or inputs; all share weights and state."""
        for variant in reversed(self.variants):
            if variant.mode == mode and variant.takes(self.model, args, kwargs):
                break
        else:
            if mode != now.mode:
                log.python.info("train(), eval() or autocast: compiling for the other mode")
            variant = self._new_variant(now, args, kwargs)
            if mode == now.mode:
                log.python.info("Options.programs: compiled for %s, too", variant.inputs)
        with interrupts.deferred():
            self._move(variant, restored=True)
            others = [other for other in self.variants if other is not variant]
            alike = [other for other in others if other.mode == variant.mode]
            for other in alike[: max(0, len(alike) + 1 - now.spec.runtime.programs)]:
                self._tell_dropped(other)
                others.remove(other)
            self.variants = [*others, variant]
        return variant

    def _tell_dropped(self, variant: Variant) -> None:
        said, self._told_dropped = self._told_dropped, True
        count = variant.spec.runtime.programs
        (log.python.info if said else log.python.warning)(
            "Options.programs(%d) is full: the program for %s goes, and such a call will compile "
            "again. options.programs(%d) keeps one more; poptorch.PadToSizes makes fewer shapes",
            count, variant.inputs, count + 1,
        )  # fmt: skip

    def _compile_again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Go on with a program for the optimizer as it is now, weights and all state kept."""
        log.python.info("The optimizer's structure changed: compiling again, with its state kept")
        variant = self._new_variant(self.now, args, kwargs)
        assert self.optimizer is not None
        with interrupts.deferred():
            self.optimizer.detach()
            self.optimizer.compiled(variant.task)
            self._move(variant, restored=False)
            self.variants = [variant]

    def _move(self, variant: Variant, restored: bool) -> None:
        """Let the store of a program take the place of the present one, with its state."""
        old = self._attached_store()
        if variant.store is None:
            variant.store = StateStore(variant.compiled, variant.reading, self.device, old)
        else:
            variant.store.take_over(old)
        if not variant.store.downloads_all_of(old):
            self._bring_host_up_to_date()
        if self.optimizer is not None:
            self.optimizer.attach(variant.store, restored)
        self.store = variant.store

    def _new_variant(
        self, now: Variant, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Variant:
        bound = self.model.signature.bind(args, kwargs, like=now.inputs.bound)
        if now.spec.runtime.programs > 1:
            spec = dividing(bound, self._spec)
        else:
            spec = now.spec
            now.inputs.take(args, kwargs, self.model.signature)
        self.fetch()
        self._bring_host_up_to_date()
        task = self.model.task(bound, spec, self._freeze)
        variant = self._compiled(task, background=True)
        remember_compiled(variant, self.model.module)
        return variant

    # Weights: host and device.

    @_locked
    def copy_to_host(self) -> None:
        _ = self.now
        if self.store is not None:
            self.device.fetch()
        self._download()

    @_locked
    def copy_to_device(self) -> None:
        """Copy weights and buffers to the device; training progress on it is discarded.

        While detached nothing happens: attaching uploads.
        """
        _ = self.now
        if self.store is None:
            return
        self._next_check = 0.0
        with interrupts.deferred(), self._copying():
            if self._taking_over:  # what a trainer has is alike in all processes
                self.store.write_all()
            elif self.store.upload():
                self._written = self.store.digests()

    @_locked
    def copy_buffers_to_device(self) -> None:
        names = self.now.spec.updatable_buffers
        if not names:
            raise Error(
                "No named buffers marked as updatable",
                fix="options.updatableNamedBuffers(['name']) before wrapping",
            )
        if self.store is not None:
            self.store.upload_buffers(names)

    def bring_host_up_to_date(self) -> bool:
        """Download if the device is newer; return whether it was."""
        self._next_check = 0.0
        if not self.device.newer:  # then nobody waits, for a compilation least of all
            return False
        with self.lock():
            return self._bring_host_up_to_date()

    def _bring_host_up_to_date(self, local_only: bool = False) -> bool:
        """Download if the device is newer; ``local_only``: without exchanging anything."""
        if not self.device.newer or self.store is None or self._is_copying:
            return False
        if local_only and self.store.layout.is_in_parts:
            self._download(local_only)
            return True
        log.python.debug("Implicit copyWeightsToHost()")
        owner = self._owner()
        if owner is not None:
            owner.copyWeightsToHost()
        else:
            self._download()
        return True

    def _download(self, local_only: bool = False, event: Event = Event.COPY_TO_HOST) -> None:
        if self.store is None:
            return
        with interrupts.deferred(), self._copying():
            self.store.download(event, local_only)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy weights between host and device; the copy itself looks at the module."""
        self._is_copying = True
        try:
            yield
            for variant in self.variants:
                variant.reading.refresh()
        finally:
            self._is_copying = False

    @_locked
    def fetch(self) -> None:
        """Fetch newer weights that another trainer of the same tensors has."""
        self.device.fetch()
        if self.store is not None and self.device.stale:
            self._bring_host_up_to_date()  # what another brought to the host is not all of it
            log.python.debug("Implicit copyWeightsToDevice()")
            owner = self._owner()
            assert owner is not None
            self._taking_over = True
            try:
                owner.copyWeightsToDevice()
            finally:
                self._taking_over = False

    # The device.

    @_locked
    def attach(self) -> None:
        if self.now.spec.runtime.connection == ConnectionType.Never:
            raise AssertionFailure(
                "Trying to attach to an offline device", got="ConnectionType.Never"
            )
        if self.attached:
            raise Error("Device is already attached", fix="ask isAttachedToDevice() first")
        self._attach()

    def _attach(self) -> None:
        faults.check("attach")
        now, restored = self.now, self.kept is not None
        self._acquire_chips(now.spec, now.compiled.plan.layout.reserved)
        has_agreed = self._agreed or not now.spec.runs_together
        with interrupts.deferred():
            store = StateStore(now.compiled, now.reading, self.device, agreed=has_agreed)
            for key, value in (self.kept or {}).items():
                store.write(key, value)
            if self.optimizer is not None:
                self.optimizer.attach(store, restored)
            self.random.start(store.state, restored)
            if self._left is not None and self._left != (digests := store.digests()):
                self._written = digests
            self.store = now.store = store
            self._next_check = 0.0  # what the host has now is on the device
            self._left = self.kept = None
        if not has_agreed:
            store.agree(now.spec.runtime.broadcast_weights)
            self._agreed = True
            self.device.updated(Event.UPDATE, store.written)

    @_locked
    def detach(self) -> None:
        """Save the state that only the device has and give it back."""
        _ = self.now
        if not self.attached:
            raise Error("Device is not attached", fix="ask isAttachedToDevice() first")
        self._detach()

    def _detach(self, local_only: bool = False) -> None:
        # The garbage collector may do it while another model is captured.
        with interrupts.deferred(), _capture.untraced():
            self._save_store(local_only)
        self._release_chips()

    def _save_store(self, local_only: bool) -> None:
        store = self.store
        if store is None:
            return
        self._bring_host_up_to_date(local_only)
        if self.optimizer is None and self.device.due(Event.DETACH, store.written):
            self._download(local_only, Event.DETACH)
        self.device.clear()
        self.kept = store.device_only(leaving=True)
        if self.optimizer is not None:
            self.optimizer.detach(local_only)
        self.random.leave(store.state)
        self._left = store.digests() if self._agreed and not local_only else None
        self.store = None
        for variant in self.variants:
            variant.store = None

    def _attached_store(self) -> StateStore:
        assert self.store is not None
        return self.store

    @_locked
    def close(self, local_only: bool = False) -> None:
        """Bring the host up to date and let go of programs and device.

        ``local_only``: exchange nothing with other processes: they may be gone.
        """
        self.reports.finish()
        self._detach(local_only)
        if self.optimizer is not None:
            self.optimizer.spec = None
        self.variants, self.last, self.kept = [], None, None
        self.is_trainer = False

    def _forget(self) -> None:
        """Let go of programs and device, and of what is on the device."""
        if self.optimizer is not None:
            self.optimizer.forget()
        self._release_chips()
        self.variants, self.store = [], None
        self.device.clear()

    def _acquire_chips(self, spec: Spec, count: int) -> None:
        """Acquire chips for all replicas together, unless they are held already."""
        if self._has_chips:
            return
        if spec.target.device == "model":
            tiles = spec.target.tiles or TILES[spec.target.generation or 2]
            log.engine.debug("Instantiated device, running on IPU model with %d tiles", tiles)
        else:
            wait = env.get("POPTORCH_WAIT_FOR_IPU")
            self._lease = _pod.acquire(count, spec.runtime.ipu_id, wait)
            log.engine.debug("Acquired %d IPU(s): running on device %s", count, self._lease)
        self._has_chips = True

    def _release_chips(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()
        if self._has_chips:
            self._has_chips = False
            log.engine.debug("Detached from device")

    # Optimizer, random numbers, state.

    @_locked
    def take_optimizer(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Use another optimizer, or the same one with other values; these are uploaded."""
        if self.optimizer is None:
            raise AssertionFailure("setOptimizer needs a model that is wrapped for training")
        now = self.variants[-1] if self.variants else None
        paths = now.reading.paths if now is not None else {}
        paths |= self.model.paths()  # others, if the user assigned some
        self.optimizer.take(optimizer, paths, relaxed)

    @_locked
    def state_to_save(self) -> Mapping[str, torch.Tensor]:
        """Return state that no host tensor mirrors, by key: the device's, or what was kept.

        Where processes have parts of it all of them must call this.
        """
        plan, store, kept = self.now.compiled.plan, self.store, self.kept or {}
        if self.optimizer is not None:
            kept = self.optimizer.before_save(kept)
        if self.optimizer is not None and (plan.program.shards or plan.spec.target.parts > 1):
            self.optimizer.read()
        kept = store.device_only() if store is not None else kept
        layout = store.layout if store is not None else Layout(plan)
        own = {key: value for key, value in kept.items() if key not in layout.flat}
        return {**own, **layout.gathered(kept)} if kept else own

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device, or the one that is kept for it."""
        with self.lock():
            _ = self.now
            return self.random.get(self.store.state if self.store is not None else None)

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        with self.lock():
            _ = self.now
            self.random.set(state, self.store.state if self.store is not None else None)


def _bring_up_to_date(session: Session | None) -> None:
    if session is not None:
        session.bring_host_up_to_date()


def _refuse_offline(spec: Spec) -> None:
    if spec.runtime.connection == ConnectionType.Never:
        raise AssertionFailure(
            "Trying to run a model on an offline device",
            got="ConnectionType.Never",
            fix="save it with compileAndExport(path) and run poptorch.load(path) elsewhere, "
            "or use ConnectionType.Always",
        )


@functools.cache
def _use_one_thread(process: int) -> None:
    """Let operators run in a forked process, once in each: threads do not survive a fork."""
    if processes.fork_lost_threads and torch.get_num_threads() > 1:
        log.python.warning(
            "This process was forked from one whose operators ran on several threads, which do not "
            "survive that: here they run on one. Fork first, or use the start method 'spawn'"
        )
        backends.use_one_thread()
