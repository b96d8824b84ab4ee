"""One wrapped model: bind arguments, compile once, run, collect outputs, keep weights in step.

The session knows nothing of ``Options`` or of PopTorch's names; ``executor`` is its face.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _capture, _compile
from .._base import interrupts, log, source
from .._base.errors import AssertionFailure
from .._ir.plan import Plan
from .._ir.spec import Spec
from ..enums import ConnectionType
from . import faults, hooks, reporting, running
from .arguments import dividing, return_inputs
from .connection import Connection, refuse_offline
from .counters import Stamped
from .device import Device
from .indices import Indices
from .live import LIMIT, Compilation, LastCall, Live, Restored, Variant
from .model import Model
from .modes import Mode
from .optimizer import SessionOptimizer
from .outputs import Outputs
from .random import Randomness
from .signature import Bound
from .sync import Sync, Transfers, not_compiled
from .turns import Turns
from .unfollowed import ModelChanges

Progress = Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]]


class Session:
    """One wrapped model.

    Args:
        module: the module that is traced; shares its tensors with the user's module.
        users: the user's module.
        entry: called with the user's arguments while tracing; None for the module itself.
        settings: checks and resolves every setting, at each compilation.
        optimizer: None in inference.
        transfers: the executor, or None once it is gone.
        progress: makes the context in which a compilation reports its progress.

    Attributes:
        live: what there is while the model is compiled, else None.
        sync: the device while there is one, and who has the newer weights.
        optimizer: what trains the model, None in inference.
        model: what is captured.
        restored: state from a file, until it is compiled for.
        reports: what profile reports and cycle counts are made from.
    """

    def __init__(
        self,
        module: nn.Module,
        users: nn.Module,
        entry: Callable[..., Any] | None,
        settings: Callable[[], Spec],
        optimizer: torch.optim.Optimizer | None,
        transfers: Callable[[], Transfers | None],
        progress: Progress,
    ) -> None:
        self.live: Live | None = None
        self.optimizer = SessionOptimizer(optimizer) if optimizer is not None else None
        tensors = _capture.tensors_of(module)
        self.sync = Sync(tuple(id(t.tensor) for t in tensors.values()), transfers)
        self.model = Model(module, users, entry)
        self.restored: Restored | None = None
        self._settings, self._progress = settings, progress
        self._connection, self._turns = Connection(), Turns()
        self.reports = reporting.Reports(self)

    def get_live(self) -> Live:
        """Return what there is while the model is compiled.

        Raises:
            Error: it is not compiled.
        """
        if self.live is None:
            raise not_compiled()
        return self.live

    # Compiling.

    def compile(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        background: bool = False,
        made_up: bool = False,
    ) -> None:
        """Compile for arguments of this kind. A failure leaves everything as it was.

        Args:
            args, kwargs: as for ``forward``.
            background: optimised code may come later.
            made_up: the values of the tensors mean nothing.
        """
        self._turns.take(self.live is not None)
        bound = self.model.signature.bind(args, kwargs)
        self.sync.fetch()
        spec = self._settings()
        log.limit_repeats(spec.runtime.max_repeat_logs)
        reporting.check(spec)
        try:
            self._take(self._compiled(bound, spec, background, made_up))
        except BaseException:
            self._connection.detach()
            raise
        if spec.runtime.connection != ConnectionType.Never:
            self.attach()
        self.reports.compiled()

    def _compiled(self, bound: Bound, spec: Spec, background: bool, made_up: bool) -> Compilation:
        task = self.model.task(bound, spec, self.optimizer, made_up)
        excludes = source.excluding(spec.runtime.source_excludes)
        with self._progress() as progress, hooks.around(), excludes:
            compiled = _compile.compile(
                task.request,
                spec,
                task.optim,
                progress,
                lambda count: self._placed(spec, count),
                background,
                {key: repr(value) for key, value in task.hypers.items()},
            )
        outputs = Outputs(compiled.outputs, compiled.host_outputs, spec.precision.narrow_64bit)
        checked = Indices(compiled.ranges(), bound.paths, compiled.premises)
        return Compilation(**vars(task), compiled=compiled, outputs=outputs, indices=checked)

    def _take(self, compilation: Compilation) -> None:
        """Use a compilation from now on, without attaching."""
        # After capturing: a forward that sets modes itself has set them by now.
        mode = self.model.modes.now()
        changes = ModelChanges(
            self.model.module,
            compilation.reading.tensors,
            self.model.users,
            self.model.wrapped_forward,
        )
        live = Live(compilation, mode, Randomness.of(compilation.spec), changes)
        if self.restored is not None:
            live.kept = compilation.checked_state(self.restored.device)
            live.random.set(self.restored.random, None)
        if self.optimizer is not None:
            self.optimizer.compiled(compilation)
        self.live, self.restored = live, None
        self.sync.begin()

    def plan(self) -> Plan:
        """Return the compiled plan, cut into stages; the cutting is done when first asked for."""
        live = self.get_live()
        now = live.now
        if now.compiled.plan.staged is None:
            self.sync.bring_host_up_to_date()  # or forward would, during the capture
            plan = _compile.with_stages(now.compiled.plan, now.request, now.optim)
            compiled = dataclasses.replace(now.compiled, plan=plan)
            live.replace(dataclasses.replace(now, compiled=compiled))
        compiled = live.now.compiled
        tier = compiled.executable.report().tier
        if compiled.plan.tier != tier:
            plan = dataclasses.replace(compiled.plan, tier=tier)
            compiled = dataclasses.replace(compiled, plan=plan)
            live.replace(dataclasses.replace(live.now, compiled=compiled))
        return compiled.plan

    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _capture.Explanation:
        """List what a capture for arguments of this kind would refuse or freeze."""
        bound = self.model.signature.bind(args, kwargs)
        self.sync.fetch()
        return _capture.explain(self.model.task(bound, self._settings(), self.optimizer).request)

    def shares(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], chips: int, limit: int | None
    ) -> list[_compile.Share]:
        """Divide the module over chips, for arguments of this kind."""
        bound = self.model.signature.bind(args, kwargs)
        task = self.model.task(bound, self._settings(), self.optimizer)
        return _compile.shares(task.request, task.spec, task.optim, chips, limit)

    def _placed(self, spec: Spec, count: int) -> None:
        faults.check("compile")
        if spec.runtime.connection == ConnectionType.Always:
            self._connection.attach(spec, count)

    # The device.

    @property
    def attached(self) -> bool:
        """Whether there is a device."""
        return self.sync.device is not None

    def attach(self) -> None:
        """Acquire the device and put everything that belongs there on it.

        Raises:
            Error: not compiled, or no device is free.
        """
        live = self.get_live()
        faults.check("attach")
        now, restored = live.now, live.kept is not None
        self._connection.attach(now.spec, now.compiled.plan.layout.reserved)
        with interrupts.deferred():
            device = Device(now.compiled, now.reading, agreed=live.has_agreed)
            if live.kept is not None:
                device.restore(live.kept)
            if self.optimizer is not None:
                self.optimizer.attach(device, restored)
            live.random.start(device.state, restored)
            self.sync.take(device)
            live.variants[-1].device, live.kept = device, None
        self.sync.dirty |= live.begin_alike(device)

    def detach(self, alone: bool = False) -> None:
        """Save what is only on the device and give it back; ``alone``: exchanging nothing."""
        # The garbage collector may do it while another is captured.
        with interrupts.deferred(), _capture.untraced():
            self._save_device(alone)
        self._connection.detach()

    def _save_device(self, alone: bool) -> None:
        device = self.sync.device
        if device is None:
            return
        live = self.get_live()
        self.sync.bring_host_up_to_date(alone)
        live.kept = device.device_only()
        if self.optimizer is not None:
            self.optimizer.detach(alone)
        live.random.leave(device.state)
        self.sync.give_back(live.agreed and not alone)
        for variant in live.variants:
            variant.device = None

    def state_to_save(self) -> Mapping[str, torch.Tensor]:
        """Return state that no host tensor mirrors, by key: the device's, or what was kept.

        Where processes have parts of it all of them must call this.
        """
        device, live = self.sync.device, self.get_live()
        plan = live.now.compiled.plan
        if self.optimizer is not None and (plan.program.shards or plan.spec.target.parts > 1):
            self.optimizer.read()
        return live.whole(device.device_only() if device is not None else live.kept or {})

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device, or the one that is kept for it."""
        device = self.sync.device
        return self.get_live().random.get(device.state if device is not None else None)

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        device = self.sync.device
        self.get_live().random.set(state, device.state if device is not None else None)

    def release(self, alone: bool = False) -> None:
        """Bring the host up to date and let go of executable and device, as ``detach``."""
        self.detach(alone)
        if self.optimizer is not None:
            self.optimizer.spec = None
        self.live = None
        self.sync.dirty = False

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do one call on the device and return what ``forward`` returns.

        A first call that fails leaves everything as if it had not been made.
        """
        with self._turns.take(self.live is not None):
            if self.live is not None:
                return self._call(self.live, args, kwargs)
            restored = self.restored
            try:
                self.compile(args, kwargs, background=True)
                return self._call(self.get_live(), args, kwargs)
            except Exception:
                self._forget()
                self.restored = restored
                raise

    def _forget(self) -> None:
        """Let go of the executable and the device, and of what is on the device."""
        if self.optimizer is not None:
            self.optimizer.forget()
        self._connection.detach()
        self.live = self.sync.device = None
        self.sync.dirty = False

    def _call(self, live: Live, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        live.changes.say_layers()
        if self.sync.device is None:
            refuse_offline(live.now.spec)
            self.attach()
        if self.optimizer is not None and self.optimizer.prepare_run():
            self._compile_again(live, args, kwargs)
        mode = self.model.modes.now()
        if mode != live.mode or (live.several and not live.now.takes(self.model, args, kwargs)):
            self._change_program(live, mode, args, kwargs)
        now = live.now
        started = time.perf_counter()
        self.sync.fetch()
        given = now.inputs.quick(args, kwargs)
        if given is None:
            bound = self.model.signature.bind(args, kwargs, like=now.inputs.bound)
            now.inputs.check(bound)
            given = bound.tensors
        batch = now.inputs.prepare(given)
        taken = time.perf_counter()
        results = self.reports.run(
            now.spec, running.execute, live, self.sync, self.optimizer, live.synthetic or batch
        )
        ready = time.perf_counter()
        if live.changed_inputs and live.synthetic is None:
            return_inputs(live.changed_inputs, given, batch)
        returned = now.outputs.build(results[: now.outputs.count])
        moments = (started, taken, ready, time.perf_counter())
        live.last = LastCall(Stamped(moments), now.anchors(results))
        self.reports.called(now.spec)
        return returned

    def _change_program(
        self, live: Live, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Go on with the program for another mode or inputs; all share weights and state."""
        variant = live.find(mode, self.model, args, kwargs)
        if variant is None:
            if mode != live.mode:
                log.python.info("train() or eval() was called: compiling for the other mode")
            variant = self._new_variant(live, args, kwargs)
            if mode == live.mode:
                log.python.info("%s: compiled for %s, too", LIMIT, variant.compilation.inputs)
        with interrupts.deferred():
            self._move(variant, restored=True)
            live.use(variant)

    def _compile_again(self, live: Live, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Go on with a program for the optimizer as it is now, weights and all state kept."""
        log.python.info("The optimizer's structure changed: compiling again, with its state kept")
        variant = self._new_variant(live, args, kwargs)
        assert self.optimizer is not None
        with interrupts.deferred():
            self.optimizer.detach()
            self.optimizer.compiled(variant.compilation)
            self._move(variant, restored=False)
            live.variants.clear()
            live.use(variant)

    def _move(self, variant: Variant, restored: bool) -> None:
        """Let the device of a program take the place of the present one, and what it has."""
        old = self.sync.get_device()
        device = variant.go_on_from(old)
        if not device.downloads_all_of(old):
            self.sync.bring_host_up_to_date()
        if self.optimizer is not None:
            self.optimizer.attach(device, restored)
        self.sync.device = device

    def _new_variant(self, live: Live, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
        bound = self.model.signature.bind(args, kwargs, like=live.now.inputs.bound)
        spec = dividing(bound, live.spec) if live.several else live.spec
        if not live.several:
            live.now.inputs.check(bound)
            live.now.inputs.prepare(bound.tensors)
        self.sync.fetch()
        self.sync.bring_host_up_to_date()
        compilation = self._compiled(bound, spec, background=True, made_up=False)
        return Variant(self.model.modes.now(), compilation)

    def take_optimizer(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Use another optimizer; values that changed are uploaded.

        Args:
            optimizer: the one to use from now on.
            relaxed: do not warn of attributes that it did not have before.

        Raises:
            AssertionError: unsupported type, or this is an inference session.
            Error: its structure is not the compiled one.
        """
        if self.optimizer is None:
            raise AssertionFailure("setOptimizer needs a model that is wrapped for training")
        now = self.live.now if self.live is not None else None
        paths = now.reading.paths if now is not None else {}
        paths |= self.model.paths()  # others, if the user assigned some
        self.optimizer.take(optimizer, paths, now.spec if now is not None else None, relaxed)
