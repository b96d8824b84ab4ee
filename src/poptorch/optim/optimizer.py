"""What the optimizers of this package add to torch's: device state, constness, extra attributes.

Source: PopTorch user guide, "Optimizers" and "Features".
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from .._base.errors import AssertionFailure, StateError
from .numbers import number
from .variable_attributes import VariableAttributes

_KEYS = ("ipu_state", "ipu_param")
ACCUMULATION_DTYPES = (torch.float16, torch.float32)


class DeviceLink(Protocol):
    """What an executor attaches to the optimizer that it trains with."""

    def read_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the device's ``ipu_state`` and ``ipu_param`` as host tensors."""


class Optimizer:
    """Mixin of the optimizers whose device state can be saved and restored.

    Attributes:
        ipu_state_is_dirty: the cached state is newer than the device's and must be uploaded.
        host_state_is_dirty: the device's state is newer than the cached one.
        variable_attrs: which attributes may change after compilation.
    """

    _child_vars = ["loss_scaling"]
    _child_only: list[str] = []
    _group_vars: list[str] = []

    variable_attrs: VariableAttributes
    loss_scaling: float

    def __init__(self) -> None:
        self._state_dict: dict[str, dict[str, Any] | None] = dict.fromkeys(_KEYS)
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False
        self._device: weakref.ref[DeviceLink] | None = None

    def _construct(
        self,
        initialise: Callable[..., None],
        given: Mapping[str, Any],
        native: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        """Do what every constructor does.

        Args:
            initialise: the constructor of torch's class.
            given: all arguments by name, None for those that take the default.
            native, own: defaults of what torch's class takes, and of what it lacks.
        """
        native, own = _filled_in(given, native), _filled_in(given, own)
        if "betas" in native:
            native["betas"] = pair_of_betas(native["betas"])
        _check_accumulation_types(own)
        initialise(self, given["params"], **native)
        Optimizer.__init__(self)
        self._take(own, given)

    def _take(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Keep the attributes that torch's class lacks; those given explicitly are variable."""
        for name, value in own.items():
            setattr(self, name, value)
        allowed = [*self.defaults, *self._child_vars]  # type: ignore[attr-defined]
        explicit = (name for name, value in given.items() if value is not None)
        self.variable_attrs = VariableAttributes((n for n in explicit if n in allowed), allowed)

    # The executor's side.

    def _attach_device(self, link: DeviceLink) -> None:
        """Read the state through ``link`` (weakly held) whenever ``host_state_is_dirty``."""
        self._device = weakref.ref(link)

    def _detach_device(self) -> None:
        """Take the device's state over for good and forget the device."""
        self._synchronise()
        self._device = None

    def _synchronise(self) -> None:
        link = self._device() if self._device is not None else None
        if self.host_state_is_dirty and link is not None:
            state, param = link.read_state()
            self._state_dict = {"ipu_state": state, "ipu_param": param}
            self.host_state_is_dirty = False

    # The user's side.

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with two more keys, ``ipu_state`` and ``ipu_param``.

        They are None until a model that uses this optimizer has been compiled; then dictionaries
        of CPU tensors, read from the device at most once per training call.
        """
        self._synchronise()
        native: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**native, **self.get_state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; the device gets it before its next use.

        Entries missing from the inner dictionaries keep the device's values. None in both
        places loads torch's part only.

        Raises:
            RuntimeError: the dictionary is empty, or was not saved by one of these optimizers;
                nothing has changed then.
        """
        if not state:
            raise StateError("Cannot load the optimizer state because it is empty")
        inner = {key: state.get(key, 0) for key in _KEYS}
        if not all(value is None or isinstance(value, dict) for value in inner.values()):
            raise StateError(
                "Only IPU optimizer states can be loaded onto the IPU.",
                got=f"a dictionary with the keys {', '.join(map(str, state))}",
                fix="load what state_dict() of a poptorch.optim optimizer returned, or add "
                '{"ipu_state": None, "ipu_param": None} to load only the parameter groups',
            )
        rest = {key: value for key, value in state.items() if key not in _KEYS}
        device = self._device
        super().load_state_dict(rest)  # type: ignore[misc]
        self._device = device  # torch restores as if from a pickle, which has none
        self.set_state_dict(inner)

    def get_state_dict(self) -> dict[str, Any]:
        """Return the cached ``ipu_state`` and ``ipu_param`` without asking the device."""
        return {key: None if v is None else dict(v) for key, v in self._state_dict.items()}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the cached ``ipu_state`` and ``ipu_param``; they are uploaded before next use."""
        inner = {key: state.get(key) for key in _KEYS}
        self._state_dict = {key: None if v is None else dict(v) for key, v in inner.items()}
        self.ipu_state_is_dirty = self.has_state()
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        """Tell whether there is a cached device state."""
        return all(value is not None for value in self._state_dict.values())

    def __getstate__(self) -> dict[str, Any]:
        self._synchronise()
        native: Any = super().__getstate__()
        kept = {*self._child_only, *self._child_vars, "variable_attrs"}
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


def _filled_in(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with every given value that is not None in their place."""
    return {k: v if given.get(k) is None else given[k] for k, v in defaults.items()}


def _check_accumulation_types(own: Mapping[str, Any]) -> None:
    """Refuse dtypes that accumulators and moments cannot have.

    Raises:
        AssertionError: one is neither float16 nor float32.
    """
    dtypes = (value for name, value in own.items() if name.endswith("accum_type"))
    wrong = [str(dtype) for dtype in dtypes if dtype not in ACCUMULATION_DTYPES]
    if wrong:
        raise AssertionFailure(
            "Accumulation types must be either torch.float32 or torch.float16",
            got=", ".join(wrong),
        )


def pair_of_betas(betas: Any) -> tuple[float, float]:
    """Return betas as a tuple; lists, as read from configuration files, are converted.

    Raises:
        AssertionError: not a pair of numbers.
    """
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not is_pair or not all(isinstance(beta, int | float) for beta in betas):
        raise AssertionFailure(
            "Expected a pair for betas", got=repr(betas), fix="betas=(0.9, 0.999)"
        )
    return number("betas", betas[0]), number("betas", betas[1])


Params = Iterable[Any]
