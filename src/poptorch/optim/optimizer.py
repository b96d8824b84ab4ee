"""Define the base class of this package's optimizers: their state on the device, which attributes
are constants of the program, and additional attributes.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .._base.errors import AssertionFailure, StateError
from .._base.user_modes import without_user_modes
from .arguments import pair_of_betas

_KEYS = ("ipu_state", "ipu_param")
Params = Iterable[Any]


class VariableAttributes:
    """Choose which attributes of an optimizer may change after compilation.

    By default, these are the attributes that you passed to the constructor. Change the choice
    before you pass the optimizer to a model.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]):
        self._variable_attributes = set(variable_attributes)
        self._allowed_attributes = list(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        """Return whether the attribute is a constant of the program."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make the attribute's value a constant of the program.

        Raises:
            AssertionError: the optimizer has no such attribute.
        """
        self._check(attr)
        self._variable_attributes.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute's value change after compilation.

        Raises:
            AssertionError: the optimizer has no such attribute.
        """
        self._check(attr)
        self._variable_attributes.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            raise AssertionFailure(
                f"Unknown attribute {attr!r}",
                fix=f"pass an attribute of this optimizer: {', '.join(self._allowed_attributes)}",
            )


class DeviceState:
    """The state of an optimizer, which is read from the device of an executor when it is used."""

    ipu_state_is_dirty: bool
    host_state_is_dirty = False
    _device: weakref.ref[Any] | None = None  # a SessionOptimizer

    @property
    def writes_numbers(self) -> bool:
        """Return whether the step changes groups or the optimizer itself."""
        return False

    @property
    def _link(self) -> Any:
        return self._device() if self._device is not None else None

    def _attach_device(self, link: Any) -> None:
        self._device = weakref.ref(link)

    def _detach_device(self) -> None:
        self._synchronise()
        self._device = None

    def _ran(self, updates: int) -> None:
        self.host_state_is_dirty = True

    def _synchronise(self) -> None:
        link = self._link
        if link is None or not self.host_state_is_dirty:
            return
        with link.lock(), without_user_modes():
            if self.host_state_is_dirty:
                self._read_from(link)
                self.host_state_is_dirty = False

    def _read_from(self, link: Any) -> None:
        raise NotImplementedError

    def _is_settled(self) -> bool:
        """Return whether nothing has to be written to the device, or reported."""
        return not (self.ipu_state_is_dirty or self._has_lost_edits)

    @property
    def _has_lost_edits(self) -> bool:
        """Return whether the user changed tensors that are older than those on the device."""
        return False

    def _warn_of_lost_edits(self) -> None:
        """Report changed tensors that the device does not receive; there are none here."""


class Optimizer(DeviceState):
    """Base of these optimizers: their state on the device can be saved and restored.

    Attributes:
        ipu_state_is_dirty: the cached state is newer than the state on the device.
        host_state_is_dirty: the state on the device is newer than the cached one.
        variable_attrs: which attributes may change after compilation.
    """

    _child_vars = ["loss_scaling"]
    _own: dict[str, Any] = {}  # attributes that torch's class lacks, with their defaults

    variable_attrs: VariableAttributes
    loss_scaling: float

    def __init__(self) -> None:
        self._state_dict: dict[str, dict[str, Any] | None] = dict.fromkeys(_KEYS)
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False
        self._device = None
        # The tensors whose state is cached, by path, if the state was read from a device and not
        # loaded.
        self._whose: dict[str, weakref.ref[torch.Tensor]] = {}

    def _construct(self, arguments: Mapping[str, Any]) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        if "betas" in given:
            given["betas"] = pair_of_betas(given["betas"])
        own = {name: given.get(name, default) for name, default in self._own.items()}
        dtypes = (value for name, value in own.items() if name.endswith("accum_type"))
        wrong = [str(dtype) for dtype in dtypes if dtype not in (torch.float16, torch.float32)]
        if wrong:
            raise AssertionFailure(
                "Accumulation types must be either torch.float32 or torch.float16",
                got=", ".join(wrong),
                fix="use torch.float32, or omit the argument",
            )
        self._initialise(given["params"], given)
        Optimizer.__init__(self)
        self._store_attributes(own, given)

    def _initialise(self, params: Params, given: Mapping[str, Any]) -> None:
        """Call the constructor of torch's class, which has other defaults."""
        native: Callable[..., None] = super().__init__
        names = [*inspect.signature(native).parameters][1:]
        native(params, **{name: given[name] for name in names if name in given})

    def _store_attributes(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Store the attributes that torch's class lacks. Those that were passed explicitly are
        variable.
        """
        for name, value in own.items():
            setattr(self, name, value)
        allowed = [*self.defaults, *self._child_vars]  # type: ignore[attr-defined]
        self.variable_attrs = VariableAttributes((n for n in given if n in allowed), allowed)

    def _read_from(self, link: Any) -> None:
        state, param = link.read_state()
        self._state_dict = {"ipu_state": state, "ipu_param": param}
        self._whose = {path: weakref.ref(weight) for path, weight in self._weights(link)}

    def _weights(self, link: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that a device trains for this optimizer, with their paths in
        the model.
        """
        for group in self.param_groups:  # type: ignore[attr-defined]
            for weight in group["params"]:
                path = link.paths.get(id(weight))
                if path is not None:
                    yield path, weight

    def _state_of_present_weights(self, link: Any) -> dict[str, torch.Tensor]:
        """Return the cached state without that of weights that were replaced by others."""
        present = dict(self._weights(link))
        others = [p for p, w in self._whose.items() if p in present and w() is not present[p]]
        state = self._state_dict["ipu_state"] or {}
        return {name: v for name, v in state.items() if name.partition("___")[2] not in others}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with two more keys, ``ipu_state`` and ``ipu_param``.

        They are None until a model with this optimizer is compiled. Then they are dictionaries of
        CPU tensors, copied from the device at most once per training call.
        """
        self._synchronise()
        native: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**native, **self.get_state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; the device gets it before its next call.

        Missing entries keep the device's values. If ``ipu_state`` and ``ipu_param`` are None, only
        torch's part is loaded.

        Raises:
            RuntimeError: the dictionary is empty, or another kind of optimizer saved it. Nothing
                is changed.
        """
        if not state:
            raise StateError(
                "Cannot load the optimizer state because it is empty",
                got=repr(state),
                fix="load a state that state_dict() of a poptorch.optim optimizer returned",
            )
        inner = {key: state.get(key, 0) for key in _KEYS}
        if not all(value is None or isinstance(value, dict) for value in inner.values()):
            raise StateError(
                "Only IPU optimizer states can be loaded onto the IPU.",
                got=f"a dictionary with the keys {', '.join(map(str, state))}",
                fix=(
                    "load a state that state_dict() of a poptorch.optim optimizer returned; "
                    'to load only the parameter groups, add {"ipu_state": None, "ipu_param": '
                    "None}"
                ),
            )
        rest = {key: value for key, value in state.items() if key not in _KEYS}
        device = self._device
        super().load_state_dict(rest)  # type: ignore[misc]
        self._device = device  # torch restores the object like a pickle, which has no device
        self.set_state_dict(inner)

    def get_state_dict(self) -> dict[str, Any]:
        """Return the cached ``ipu_state`` and ``ipu_param`` without asking the device."""
        return {key: None if v is None else dict(v) for key, v in self._state_dict.items()}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the cached ``ipu_state`` and ``ipu_param``; the next call copies them to
        the device.
        """
        inner = {key: state.get(key) for key in _KEYS}
        self._state_dict = {key: None if v is None else dict(v) for key, v in inner.items()}
        self._whose = {}
        self.ipu_state_is_dirty = self.has_state()
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Return whether there is a cached device state."""
        return all(value is not None for value in self._state_dict.values())

    def __getstate__(self) -> dict[str, Any]:
        self._synchronise()
        native: Any = super().__getstate__()
        kept = {*self._own, "variable_attrs"}
        own = {k: v for k, v in self.__dict__.items() if k in kept}
        return {**native, **own, **self.get_state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__init__(self)
        self.set_state_dict(state)
        rest = {key: value for key, value in state.items() if key not in _KEYS}
        super().__setstate__(rest)  # type: ignore[misc]

    def __copy__(self) -> Optimizer:
        other = type(self).__new__(type(self))
        state = self.__getstate__()
        state["param_groups"] = [{**g, "params": list(g["params"])} for g in state["param_groups"]]
        state["state"] = copy.copy(state["state"])
        state["defaults"] = dict(state["defaults"])
        state["variable_attrs"] = copy.deepcopy(state["variable_attrs"])
        other.__setstate__(state)
        return other
