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
from .._base import log, source
from .._base.errors import AssertionFailure, Error
from .._ir.optim_spec import OptimSpec
from .._ir.plan import Plan
from .._ir.spec import Spec
from ..enums import ConnectionType
from . import faults, grouping, hooks
from .arguments import Bound, Inputs, Signature
from .capturing import Capturing, state_slot
from .connection import Connection, refuse_offline
from .counters import Stamped
from .device import Device
from .outputs import Outputs
from .random import Randomness
from .seat import Seat
from .sync import Sync, Transfers, not_compiled

Progress = Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]]


class Session:
    """One wrapped model.

    Args:
        module: the module that is traced; shares its tensors with the user's module.
        entry: called with the user's arguments while tracing; None for the module itself.
        settings: checks and resolves every setting, at each compilation.
        optimizer: None in inference.
        transfers: the executor, or None once it is gone.
        progress: makes the context in which a compilation reports its progress.

    Attributes:
        sync: who has the newer weights.
        seat: of the optimizer, None in inference.
        compiled: the compilation, None before it and after ``release``.
        spec: its settings.
    """

    def __init__(
        self,
        module: nn.Module,
        entry: Callable[..., Any] | None,
        settings: Callable[[], Spec],
        optimizer: torch.optim.Optimizer | None,
        transfers: Callable[[], Transfers | None],
        progress: Progress,
    ) -> None:
        self.seat = Seat(optimizer) if optimizer is not None else None
        tensors = _capture.tensors_of(module)
        self.sync = Sync(tuple(id(t.tensor) for t in tensors.values()), transfers)
        self.groupings: dict[str, grouping.Request] = {}
        self.compiled: _compile.Compiled | None = None
        self.inputs: Inputs | None = None
        self.outputs: Outputs | None = None
        self.anchors: dict[str, torch.Tensor] = {}
        self.stamps: Stamped | None = None
        self._module = module
        self._entry = entry
        self._settings = settings
        self._progress = progress
        self._signature = Signature(entry or module.forward, type(module).__name__)
        self._connection = Connection()
        self._tensors: Mapping[str, _capture.Tied] = {}
        self._paths: dict[int, str] = {}
        self._groups: dict[str, grouping.Grouping] = {}
        self._random: Randomness | None = None
        self._saved: dict[str, torch.Tensor] | None = None
        self._spec: Spec | None = None
        self._changed_inputs: list[int] = []
        self._synthetic: list[torch.Tensor] | None = None

    # Compiling.

    @property
    def spec(self) -> Spec:
        """The settings of the compilation.

        Raises:
            Error: not compiled.
        """
        if self._spec is None:
            raise not_compiled()
        return self._spec

    def compile(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], background: bool = False
    ) -> None:
        """Compile for arguments of this kind. A failure leaves everything as it was.

        Args:
            background: optimised code may come later.
        """
        bound = self._signature.bind(args, kwargs)
        self.sync.fetch()
        spec = self._settings()
        log.limit_repeats(spec.runtime.max_repeat_logs)
        excludes = source.excluding(spec.runtime.source_excludes)
        if spec.runtime.cycle_count and spec.target.device == "model":
            raise Error(
                "The IPU model has no cycle counts",
                got="logCycleCount(True) with the simulated device",
                fix="drop one of the two",
            )
        request, inputs, optim, values = self._request(bound, spec)
        try:
            with self._progress() as progress, hooks.around(), excludes:
                compiled = _compile.compile(
                    request,
                    spec,
                    optim,
                    progress,
                    lambda count: self._placed(spec, count),
                    background,
                )
        except BaseException:
            self._connection.detach()
            raise
        self.install(spec, compiled, inputs, optim, values)
        if spec.runtime.connection != ConnectionType.Never:
            self.attach()

    def plan(self) -> Plan:
        """Return the compiled plan, cut into stages; the cutting is done when first asked for."""
        compiled, inputs = self.compiled, self.inputs
        if compiled is None or inputs is None:
            raise not_compiled()
        if compiled.plan.staged is None:
            request, _, optim, _ = self._request(inputs.bound, self.spec)
            plan = _compile.with_stages(compiled.plan, request, optim)
            self.compiled = compiled = dataclasses.replace(compiled, plan=plan)
        return compiled.plan

    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _capture.Explanation:
        """List what a capture for arguments of this kind would refuse or freeze."""
        bound = self._signature.bind(args, kwargs)
        self.sync.fetch()
        return _capture.explain(self._request(bound, self._settings())[0])

    def shares(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], chips: int, limit: int | None
    ) -> list[_compile.Share]:
        """Divide the module over chips, for arguments of this kind."""
        spec = self._settings()
        request, _, optim, _ = self._request(self._signature.bind(args, kwargs), spec)
        return _compile.shares(request, spec, optim, chips, limit)

    def _request(
        self, bound: Bound, spec: Spec
    ) -> tuple[_capture.Request, Inputs, OptimSpec | None, dict[str, float]]:
        """Return what to capture, the kind of inputs, and the optimizer as it is now."""
        inputs = Inputs(bound, spec.loops, spec.precision.narrow_64bit)
        self.read_module(spec)
        optim, values = self.frozen_optimizer(spec)
        call = self._signature.caller(self._entry or self._module.__call__, bound)
        capturing = Capturing(self._module, self._tensors, self._groups, spec)
        return capturing.request(call, bound, inputs, optim), inputs, optim, values

    def install(
        self,
        spec: Spec,
        compiled: _compile.Compiled,
        inputs: Inputs,
        optim: OptimSpec | None,
        values: Mapping[str, float],
    ) -> None:
        """Take a compilation over, without attaching."""
        if self.seat is not None and optim is not None:
            self.seat.compiled(optim, values)
        self._random = Randomness(spec.target.seed, spec.target.process_id)
        self._changed_inputs = compiled.changed_inputs()
        self._spec, self.compiled, self.inputs = spec, compiled, inputs
        self.outputs = Outputs(compiled.outputs, compiled.host_outputs)
        self._synthetic = inputs.synthetic() if spec.target.synthetic_data else None
        self.sync.compiled, self.sync.dirty = True, False

    def _placed(self, spec: Spec, count: int) -> None:
        faults.check("compile")
        if spec.runtime.connection == ConnectionType.Always:
            self._connection.attach(spec, count)

    def read_module(self, spec: Spec) -> None:
        """Look at the module's tensors as they are now.

        Raises:
            Error: a grouped parameter does not fit, or a buffer that is named does not exist.
        """
        self._tensors = _capture.tensors_of(self._module)
        self._paths = {
            tied.tensor.data_ptr(): path
            for path, tied in self._tensors.items()
            if tied.is_parameter
        }
        self._groups = {}
        for path, asked in self.groupings.items():
            found = asked.resolve(path, self._tensors[path].tensor, spec.loops.replicas)
            if found is not None:
                self._groups[path] = found
        buffers = {path for path, tied in self._tensors.items() if not tied.is_parameter}
        unknown = sorted(set(spec.updatable_buffers) - buffers)
        if unknown:
            raise Error(
                "A buffer named as updatable does not exist",
                got=", ".join(unknown),
                fix=f"the model has {', '.join(sorted(buffers)) or 'no buffers'}",
            )

    def frozen_optimizer(self, spec: Spec) -> tuple[OptimSpec | None, dict[str, float]]:
        """Return the optimizer's structure and values for the module that was read."""
        return (None, {}) if self.seat is None else self.seat.frozen(self._paths, spec)

    # The device.

    @property
    def attached(self) -> bool:
        """Whether there is a device."""
        return self.sync.device is not None

    def attach(self) -> None:
        """Acquire the device and put everything that belongs there on it."""
        assert self.compiled is not None
        assert self._random is not None
        faults.check("attach")
        self._connection.attach(self.spec, self.compiled.plan.layout.reserved)
        device = Device(
            self.compiled,
            self._tensors,
            self._groups,
        )
        if self._saved is not None:
            device.restore(self._saved)
        if self.seat is not None:
            self.seat.attach(device, restored=self._saved is not None)
        self._random.start(device.state, restored=self._saved is not None)
        self.sync.device, self._saved = device, None

    def detach(self) -> None:
        """Save what is only on the device and give the device back."""
        with _capture.untraced():  # the garbage collector may do it while another is captured
            self._save_device()
        self._connection.detach()

    def _save_device(self) -> None:
        device = self.sync.device
        if device is None:
            return
        self.sync.bring_host_up_to_date()
        self.restorable = device.device_only()
        if self.seat is not None:
            self.seat.detach()
        assert self._random is not None
        self._random.leave(device.state)
        self.sync.device = None

    @property
    def restorable(self) -> dict[str, torch.Tensor]:
        """State that no host tensor mirrors, by key: the device's, or what is kept for it."""
        if self.sync.device is not None:
            return self.sync.device.device_only()
        return self._saved or {}

    @restorable.setter
    def restorable(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._saved = dict(tensors)

    @property
    def random(self) -> Randomness:
        """The device's random sequence.

        Raises:
            Error: not compiled.
        """
        if self._random is None:
            raise not_compiled()
        return self._random

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device, or the one that is kept for it."""
        device = self.sync.device
        return self.random.get(device.state if device is not None else None)

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        device = self.sync.device
        self.random.set(state, device.state if device is not None else None)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that parameters and buffers have on the device, by path."""
        return {
            path: state_slot(path, tied, True, self._groups.get(path)).shape
            for path, tied in self._tensors.items()
        }

    def release(self) -> None:
        """Bring the host up to date and let go of the executable and the device."""
        self.detach()
        self.compiled = self.inputs = self.outputs = self._spec = self._random = None
        self._saved = self.stamps = None
        self.anchors = {}
        self.sync.compiled = self.sync.dirty = False

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do one call on the device and return what ``forward`` returns."""
        if self.compiled is None:
            self.compile(args, kwargs, background=True)
        assert self.compiled is not None
        assert self.inputs is not None
        assert self.outputs is not None
        if self.sync.device is None:
            refuse_offline(self.spec)
            self.attach()
        started = time.perf_counter()
        given = self.inputs.quick(args, kwargs)
        if given is None:
            bound = self._signature.bind(args, kwargs, like=self.inputs.bound)
            self.sync.fetch()
            self.inputs.check(bound)
            given = bound.tensors
        else:
            self.sync.fetch()
        batch = self.inputs.prepare(given)
        taken = time.perf_counter()
        results = self._execute(self._synthetic or batch)
        ready = time.perf_counter()
        if self._changed_inputs and self._synthetic is None:
            self._return_inputs(given, batch)
        if len(results) > self.outputs.count:
            names = (short for short, *_ in self.spec.anchors)
            self.anchors = dict(zip(names, results[self.outputs.count :], strict=True))
        returned = self.outputs.build(results[: self.outputs.count])
        self.stamps = Stamped((started, taken, ready, time.perf_counter()))
        return returned

    def _execute(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        device = self.sync.device
        assert device is not None
        assert self.compiled is not None
        if self.seat is not None:
            self.seat.before_run()
            self.sync.dirty = True
        try:
            faults.check("run")
            with _capture.without_autocast():
                results = self.compiled.executable.run(device.state, batch)
        except BaseException:
            device.clear_accumulators()
            raise
        finally:
            self.random.ran()
            if self.seat is not None:
                self.seat.after_run()
        return results

    def _return_inputs(self, given: list[torch.Tensor], batch: list[torch.Tensor]) -> None:
        """Give changes that forward made in place back where the device used a copy."""
        for at in self._changed_inputs:
            if given[at].data_ptr() != batch[at].data_ptr():
                given[at].detach().copy_(batch[at])

    def take_optimizer(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Use another optimizer; values that changed are uploaded.

        Args:
            optimizer: the one to use from now on.
            relaxed: do not warn of attributes that it did not have before.

        Raises:
            AssertionError: unsupported type, or this is an inference session.
            Error: its structure is not the compiled one.
        """
        if self.seat is None:
            raise AssertionFailure("setOptimizer needs a model that is wrapped for training")
        self.seat.take(optimizer, self._paths, self._spec, relaxed)
