"""The optimizer of a session: what it compiled to, and its state on the device and off it.

Hyper-parameters are read when an optimizer is handed over and at no other time, so that changing
them needs ``setOptimizer``. Source: PopTorch user guide, "Features" and "Optimizers".
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from .. import optim
from .._base import log
from .._base.errors import Error
from .._ir.optim_spec import OptimSpec
from .._ir.spec import Spec
from ..enums import MeanReductionStrategy, ReductionType
from ..optim.freeze import freeze
from ..optim.names import from_ipu_param, from_ipu_state, state_keys, to_ipu_param, to_ipu_state
from ..optim.replacement import check_replacement, needs_running_mean
from ..optim.unexpected import AttributeWatch
from .device import Device

Paths = Mapping[int, str]


class SessionOptimizer:
    """One optimizer of the user's at a time.

    Args:
        optimizer: the first.

    Raises:
        AssertionError: its type is not supported.
        ValueError: a setting of it cannot be honoured.

    Attributes:
        given: the user's object.
        spec: its compiled structure, None before compilation.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        freeze(optimizer, {})  # what is wrong with it is said at once
        self.given = optimizer
        self.spec: OptimSpec | None = None
        self._snapshot = _snapshot(optimizer)
        self._watch = AttributeWatch(optimizer)
        self._asked: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._device: Device | None = None

    @property
    def needs_running_mean(self) -> bool:
        """Whether its accumulators demand ``MeanReductionStrategy.Running``."""
        return needs_running_mean(freeze(self._snapshot, {})[0])

    @property
    def _visible(self) -> optim.Optimizer | None:
        """The optimizer, if its device state can be read and loaded."""
        return self.given if isinstance(self.given, optim.Optimizer) else None

    def frozen(self, paths: Paths, spec: Spec) -> tuple[OptimSpec, dict[str, float]]:
        """Return what is compiled in, from the hyper-parameters that were read before."""
        _check_membership(self._snapshot, paths)
        return self._frozen(self._snapshot, paths, spec)

    def compiled(self, spec: OptimSpec, values: Mapping[str, float]) -> None:
        """A program with this structure in it was compiled."""
        self.spec, self._asked, self._values = spec, dict(values), dict(values)

    @staticmethod
    def _frozen(
        optimizer: Any, paths: Paths, spec: Spec, compiled: OptimSpec | None = None
    ) -> tuple[OptimSpec, dict[str, float]]:
        automatic = spec.reduction.automatic_loss_scaling
        return freeze(optimizer, paths, automatic_loss_scaling=automatic, compiled=compiled)

    def take(
        self,
        optimizer: torch.optim.Optimizer,
        paths: Paths,
        spec: Spec | None,
        relaxed: bool = False,
    ) -> None:
        """Use another optimizer, or the same one with other values.

        Args:
            optimizer: the one to use from now on.
            paths: of the compiled parameters by ``data_ptr``; unused before compilation.
            spec: the compiled settings, or None before compilation.
            relaxed: say at debug level only which attributes are new.

        Raises:
            AssertionError: unsupported type.
            Error: what changed was compiled in; nothing has changed then.
        """
        snapshot = _snapshot(optimizer)
        if spec is None or self.spec is None:
            freeze(snapshot, {})
        else:
            new, asked = self._frozen(snapshot, paths, spec, self.spec)
            check_replacement(self.spec, new, _mean_strategy(spec))
            if asked != self._asked:
                self._asked, self._values = asked, dict(asked)
                if self._device is not None:
                    self._device.write_hypers(asked)
        self._watch.check(optimizer, relaxed)
        self._snapshot = snapshot
        if optimizer is not self.given:
            self._replace(optimizer)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        self._leave()
        self.given = optimizer
        visible, device = self._visible, self._device
        if visible is None or device is None:
            return  # the state of torch's optimizers cannot be seen: the device's goes on
        visible._attach_device(self)
        if visible.has_state():
            self._upload(visible, with_values=False)  # they were read already
        else:
            device.reset_optimizer_state()
            visible.host_state_is_dirty = True

    def _leave(self) -> None:
        visible = self._visible
        if visible is not None:
            visible._detach_device()

    # The device's side.

    def attach(self, device: Device, restored: bool) -> None:
        """Put hyper-parameters, and state that the optimizer brings along, on a device.

        Args:
            device: with its optimizer state at its first values, or restored.
            restored: whether the device has the state that it had when it was detached.
        """
        self._device = device
        visible = self._visible
        if visible is not None:
            visible._attach_device(self)
            if visible.ipu_state_is_dirty or (visible.has_state() and not restored):
                self._upload(visible, visible.ipu_state_is_dirty)
            elif not visible.has_state():
                visible.host_state_is_dirty = True
        device.write_hypers(self._values)

    def detach(self) -> None:
        """The device goes away: read its state first."""
        if self._device is not None:
            self._leave()
            self._device = None

    def before_run(self) -> None:
        """Upload state that was loaded since the last run."""
        visible = self._visible
        if visible is not None and visible.ipu_state_is_dirty:
            self._upload(visible, True)

    def after_run(self) -> None:
        """The device has newer state than the host; schedulers may step."""
        visible = self._visible
        if visible is not None:
            visible.host_state_is_dirty = True
        # Torch's schedulers warn when no step was made; the device made them.
        self.given._opt_called = True  # type: ignore[attr-defined]

    def _upload(self, visible: optim.Optimizer, with_values: bool) -> None:
        assert self._device is not None
        assert self.spec is not None
        cached = visible.get_state_dict()
        if with_values:
            self._values = from_ipu_param(self.spec, self._values, cached["ipu_param"])
            self._device.write_hypers(self._values)
        log.engine.debug("Writing optimiser state tensors from host to IPU memory")
        tensors = self._device.state.tensors
        for key, value in from_ipu_state(self.spec, tensors, cached["ipu_state"]).items():
            self._device.state.write(key, value)
        visible.ipu_state_is_dirty = False
        visible.host_state_is_dirty = True  # merged with what was not loaded

    def names(self) -> list[str]:
        """Return the names of hyper-parameters and state on the device."""
        assert self.spec is not None
        return [*to_ipu_param(self.spec, self._values), *state_keys(self.spec)]

    def read_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return ``ipu_state`` and ``ipu_param`` as host tensors, for ``state_dict()``."""
        assert self._device is not None
        assert self.spec is not None
        log.engine.debug("Writing optimiser state tensors from IPU to host")
        state = to_ipu_state(self.spec, self._device.state.tensors)
        return state, to_ipu_param(self.spec, self._values)


def _check_membership(optimizer: Any, paths: Paths) -> None:
    """Compare the parameters of an optimizer with those of the model.

    Raises:
        Error: none of them belongs to the model; of some a warning tells.
    """
    strangers, count = [], 0
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for place, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            count += 1
            if parameter.data_ptr() not in paths:
                what = f"'{name}'" if name else f"{place} of group {index}"
                strangers.append(f"{what} of shape {tuple(parameter.shape)}")
    if not strangers:
        return
    if len(strangers) == count:
        raise Error(
            "None of the optimizer's parameters belongs to the model",
            got=f"{count} parameters: {_some(strangers)}",
            fix="make the optimizer from model.parameters() of the model that is wrapped",
        )
    log.python.warning(
        "%d of the optimizer's %d parameters do not belong to the model and are not trained: %s",
        len(strangers),
        count,
        _some(strangers),
    )


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")


def _mean_strategy(spec: Spec) -> MeanReductionStrategy | None:
    return spec.reduction.strategy if spec.reduction.type == ReductionType.Mean else None


def _snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """Return an object that reads like the optimizer and does not follow its changes.

    The parameters themselves are shared: which of them are trained is decided at compilation.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer  # refused by whoever reads it
    twin: Any = kind.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [
        {name: value if name == "params" else copy.deepcopy(value) for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, optim.Optimizer):
        twin.variable_attrs = copy.deepcopy(optimizer.variable_attrs)
    return twin
