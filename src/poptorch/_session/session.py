"""One wrapped model: bind arguments, compile once, run, collect outputs, keep weights in step.

The session knows nothing of ``Options`` or of PopTorch's names; ``executor`` is its face.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from .. import _capture, _compile
from .._base import log, source
from .._base.errors import Error
from .._ir.optim_spec import OptimSpec
from .._ir.slot import Kind, Slot
from .._ir.spec import Spec
from . import hooks, links
from .arguments import Bound, Inputs, Signature
from .device import Device

_versions = itertools.count(1)  # of host values, over all sessions


class Transfers(Protocol):
    """The public methods through which implicit transfers go, so that users can replace them."""

    def copyWeightsToHost(self) -> None:  # noqa: N802
        """Device to host."""

    def copyWeightsToDevice(self) -> None:  # noqa: N802
        """Host to device."""


class Session:
    """One wrapped model.

    Args:
        module: the module that is traced; shares its tensors with the user's module.
        spec: every resolved setting.
        optimizer: reads the optimizer when asked: paths by ``data_ptr`` to structure and values;
            None in inference.
        transfers: the executor, or None once it is gone.
        progress: makes the context in which a compilation reports its progress.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: Spec,
        optimizer: Callable[[Mapping[int, str]], tuple[OptimSpec, dict[str, float]]] | None,
        transfers: Callable[[], Transfers | None],
        progress: Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]],
    ) -> None:
        self.spec = spec
        self.version = 0
        self.dirty = False
        self._module = module
        self._optimizer = optimizer
        self._transfers = transfers
        self._progress = progress
        self._signature = Signature(module.forward, type(module).__name__)
        self._compiled: _compile.Compiled | None = None
        self._inputs: Inputs | None = None
        self._device: Device | None = None
        self._hosts = tuple(id(t.tensor) for t in _capture.tensors_of(module).values())
        self._seen = 0
        self._trainers: list[links.Trainer] = []
        self._generation = -1
        self.linked = False

    # Compiling.

    @property
    def compiled(self) -> _compile.Compiled | None:
        """The compilation, or None before it and after ``release``."""
        return self._compiled

    def compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compile for arguments of this kind. A failure leaves everything as it was."""
        bound = self._signature.bind(args, kwargs)
        self.bring_linked_up_to_date()
        inputs = Inputs(bound, self.spec.loops, self.spec.precision.narrow_64bit)
        tensors = _capture.tensors_of(self._module)
        optim, hypers = self._read_optimizer(tensors)
        request = self._request(bound, inputs, tensors, optim)
        with self._progress() as progress, hooks.around():
            compiled = _compile.compile(request, self.spec, optim, progress)
        device = Device(compiled, tensors, hypers, self.spec.target.seed)
        self._changed_inputs = _changed_inputs(compiled)
        self._compiled, self._inputs, self._device = compiled, inputs, device
        self.dirty = False

    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _capture.Explanation:
        """List what a capture for arguments of this kind would refuse or freeze."""
        bound = self._signature.bind(args, kwargs)
        self.bring_linked_up_to_date()
        inputs = Inputs(bound, self.spec.loops, self.spec.precision.narrow_64bit)
        tensors = _capture.tensors_of(self._module)
        optim, _ = self._read_optimizer(tensors)
        return _capture.explain(self._request(bound, inputs, tensors, optim))

    def _read_optimizer(
        self, tensors: Mapping[str, _capture.Tied]
    ) -> tuple[OptimSpec | None, dict[str, float]]:
        if self._optimizer is None:
            return None, {}
        return self._optimizer(
            {tied.tensor.data_ptr(): path for path, tied in tensors.items() if tied.is_parameter}
        )

    def _request(
        self,
        bound: Bound,
        inputs: Inputs,
        tensors: Mapping[str, _capture.Tied],
        optim: OptimSpec | None,
    ) -> _capture.Request:
        narrow = self.spec.precision.narrow_64bit
        state = tuple(_state_slot(path, tied, narrow) for path, tied in tensors.items())
        trained: frozenset[str] = frozenset()
        scaling: float | Slot = 1.0
        if optim is not None:
            trained = frozenset(path for group in optim.groups for path in group.params)
            scaling = _loss_scaling(optim)
        return _capture.Request(
            self._module,
            self._signature.caller(self._module.__call__, bound),
            tensors,
            state,
            inputs.slots(self.spec.loops),
            trained,
            optim is not None,
            scaling,
            narrow,
            lambda: inputs.first_micro_batch(self.spec.loops),
        )

    # Running.

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do one call on the device and return what ``forward`` returns."""
        if self._compiled is None:
            self.compile(args, kwargs)
        assert self._compiled is not None
        assert self._inputs is not None
        assert self._device is not None
        given = self._inputs.quick(args, kwargs)
        if given is None:
            bound = self._signature.bind(args, kwargs, like=self._inputs.bound)
            self.bring_linked_up_to_date()
            self._inputs.check(bound)
            given = bound.tensors
        else:
            self.bring_linked_up_to_date()
        batch = self._inputs.prepare(given)
        try:
            if self._optimizer is not None:
                self.dirty = True
            outputs = self._compiled.executable.run(self._device.state, batch)
        except BaseException:
            self._device.clear_accumulators()
            raise
        if self._changed_inputs:
            self._return_inputs(given, batch)
        return self._compiled.outputs.unflatten(outputs)

    def _return_inputs(self, given: list[torch.Tensor], batch: list[torch.Tensor]) -> None:
        """Give changes that forward made in place back where the device used a copy."""
        for at in self._changed_inputs:
            if given[at].data_ptr() != batch[at].data_ptr():
                given[at].detach().copy_(batch[at])

    # Keeping weights in step.

    @property
    def device(self) -> Device:
        """The device's state.

        Raises:
            Error: there is none, before compilation and after ``release``.
        """
        if self._device is None:
            raise Error(
                "The model has not been compiled or has been destroyed",
                where=source.calling_line(),
                fix="call the model, or its compile() method, with example inputs first",
            )
        return self._device

    def announce(self) -> None:
        """Host code is about to look at the module's tensors."""
        if self.dirty:
            self.bring_host_up_to_date()

    def bring_host_up_to_date(self) -> bool:
        """Download if the device is newer; return whether it was."""
        if not self.dirty or self._device is None:
            return False
        log.python.debug("Implicit copyWeightsToHost()")
        owner = self._transfers()
        if owner is not None:
            owner.copyWeightsToHost()
        else:
            self.download()
        return True

    def download(self) -> None:
        """Device to host, unconditionally."""
        device = self.device
        self.dirty = False  # first: the copy itself looks at the module
        self.version = next(_versions)
        device.download()

    def upload(self) -> None:
        """Host to device; training progress that was not downloaded is discarded."""
        device = self.device
        self.dirty = False
        device.upload()

    def bring_linked_up_to_date(self) -> None:
        """Fetch newer weights that a trainer of the same tensors holds."""
        if self._generation != links.generation():
            self._generation = links.generation()
            found = links.trainers_of(self._hosts)
            self._trainers = [trainer for trainer in found if trainer is not self]
        for trainer in self._trainers:
            trainer.bring_host_up_to_date()
            if trainer.version > self._seen:
                self._seen = trainer.version
                if self._device is not None:
                    log.python.debug("Implicit copyWeightsToDevice()")
                    owner = self._transfers()
                    assert owner is not None
                    owner.copyWeightsToDevice()

    def new_optimizer(self) -> None:
        """Read the optimizer again; values that changed are uploaded.

        Raises:
            Error: its structure is not the compiled one.
        """
        if self._device is None:
            return
        _, hypers = self._read_optimizer(_capture.tensors_of(self._module))
        self._device.write_hypers(hypers)

    def release(self) -> None:
        """Bring the host up to date and let go of the executable and the device's tensors."""
        self.bring_host_up_to_date()
        self._compiled = self._inputs = self._device = None
        self.dirty = False

    def link(self) -> None:
        """Be the trainer of the module's tensors, for inference sessions to find."""
        links.register(self, self._hosts)
        self.linked = True

    def unlink(self) -> None:
        """Stop being the trainer of the module's tensors."""
        links.forget(self._hosts)
        self.linked = False


def _state_slot(path: str, tied: _capture.Tied, narrow: bool) -> Slot:
    dtype = tied.tensor.dtype
    if narrow and dtype.is_floating_point:
        dtype = _capture.narrowed(dtype)
    kind = Kind.PARAM if tied.is_parameter else Kind.BUFFER
    return Slot(kind, path, tuple(tied.tensor.shape), dtype)


def _changed_inputs(compiled: _compile.Compiled) -> list[int]:
    """Positions of the inputs that forward changes in place."""
    graphs = compiled.plan.program.graphs.values()
    return [int(s.path) for graph in graphs for s in graph.outputs if s.kind is Kind.BATCH]


def _loss_scaling(optim: OptimSpec) -> float | Slot:
    if "loss_scaling" in optim.variables:
        return Slot(Kind.HYPER, "loss_scaling", (), torch.float32)
    value = dict(optim.settings).get("loss_scaling", 1.0)
    assert isinstance(value, float)
    return value
