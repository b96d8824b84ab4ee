"""``optimizer.state`` of torch's own optimizers, read from the device when somebody looks at it.

What is changed in tensors that were read since the last call reaches the device with the next one.
"""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .._base import log
from ..optim.freeze import address
from ..optim.optimizer import DeviceLink

_NAMES = {
    "sgd": {"Accl1": "momentum_buffer"},
    "adam": {"Accl1": "exp_avg", "Accl2": "exp_avg_sq"},
    "adamw": {"Accl1": "exp_avg", "Accl2": "exp_avg_sq"},
    "rmsprop": {"Accl1": "square_avg", "Accl2": "grad_avg", "Accl3": "momentum_buffer"},
}
_STEP = "Step"
_COUNTED = ("adam", "adamw", "rmsprop")
_version_of = operator.attrgetter("_version")


class WatchedState(collections.defaultdict[Any, Any]):
    """The dict in the place of ``optimizer.state``; copies and pickles as a plain one."""

    def __init__(self, entries: Mapping[Any, Any], announce: Callable[[], None]) -> None:
        super().__init__(dict, entries)
        self._announce = announce
        self.changed = False

    def fill(self, key: Any, values: Mapping[str, Any]) -> None:
        if dict.__contains__(self, key):
            dict.__getitem__(self, key).update(values)
        else:
            dict.__setitem__(self, key, dict(values))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.defaultdict, (dict, dict(self.items()))

    def __copy__(self) -> Any:
        return collections.defaultdict(dict, self.items())

    copy = __copy__


def _announcing(name: str, changes: bool) -> Callable[..., Any]:
    method = getattr(collections.defaultdict, name)

    def call(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self._announce()
        self.changed |= changes
        return method(self, *args, **kwargs)

    return call


_LOOKS = "__getitem__ __contains__ __iter__ __len__ __eq__ get items keys values"
_CHANGES = "__setitem__ __delitem__ clear pop popitem setdefault update"
for _name in _LOOKS.split():
    setattr(WatchedState, _name, _announcing(_name, changes=False))
for _name in _CHANGES.split():
    setattr(WatchedState, _name, _announcing(_name, changes=True))


class TorchState:
    """The state of one torch optimizer; the protocol is that of ``poptorch.optim.Optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, algorithm: str) -> None:
        self._optimizer = optimizer
        self._names = _NAMES[algorithm]
        self._counted = algorithm in _COUNTED
        self._watched: WatchedState | None = None
        self._link: weakref.ref[DeviceLink] | None = None
        self._updates = 0  # since the state was read
        self._read: list[Any] = []  # what was read from the device last
        self._tensors: list[torch.Tensor] = []  # among it
        self._versions = 0  # of these, when they were read
        self.paths: Mapping[int, str] = {}  # of parameters by the address of their values
        self.host_state_is_dirty = False  # the device's state is newer

    @property
    def was_loaded(self) -> bool:
        """Whether ``load_state_dict`` was called, which also changes hyper-parameters."""
        return self._watched is not None and self._optimizer.state is not self._watched

    @property
    def ipu_state_is_dirty(self) -> bool:
        watched = self._watched
        return self.was_loaded or (watched is not None and (watched.changed or self._edited()))

    @ipu_state_is_dirty.setter
    def ipu_state_is_dirty(self, value: bool) -> None:
        assert not value
        self._watch()

    def _entries(self) -> list[Any]:
        entries = (entry for entry in dict.values(self._optimizer.state) if type(entry) is dict)
        return list(itertools.chain.from_iterable(map(dict.values, entries)))

    def _remember(self) -> None:
        self._read = self._entries()
        self._tensors = [value for value in self._read if isinstance(value, torch.Tensor)]
        self._versions = self._sum_of_versions()

    def _sum_of_versions(self) -> int:
        return sum(map(_version_of, self._tensors))

    def _edited(self) -> bool:
        """Whether what was read has been changed since; cheap, for every call."""
        if not self._read:
            return False
        if not self.host_state_is_dirty:
            now = self._entries()
            same = len(now) == len(self._read) and all(map(operator.is_, now, self._read))
            return not same or self._sum_of_versions() != self._versions
        if self._sum_of_versions() != self._versions:  # and the device has gone on since
            self._remember()
            log.python.warning(
                "Tensors of the optimizer's state were changed that had been read before the last "
                "call: the device does not see this. Read them from optimizer.state again after "
                "a call, then change them"
            )
        return False

    def has_state(self) -> bool:
        return any(dict.values(self._optimizer.state))

    def _watch(self) -> None:
        if self._watched is None or self.was_loaded:
            self._watched = WatchedState(self._optimizer.state, self._synchronise)
            self._optimizer.state = self._watched
        self._watched.changed = False
        self._updates = 0
        self._read = []

    def ran(self, updates: int) -> None:
        self._updates += updates
        self.host_state_is_dirty = True

    def _attach_device(self, link: DeviceLink) -> None:
        self._link = weakref.ref(link)
        if self._watched is None:
            self._watch()

    def _detach_device(self) -> None:
        self._synchronise()
        self._link = None

    def _synchronise(self) -> None:
        link = self._link() if self._link is not None else None
        if link is not None and self._watched is not None and self.host_state_is_dirty:
            with link.lock():
                if self.host_state_is_dirty:
                    self._read_from(link, self._watched)

    def _read_from(self, link: DeviceLink, watched: WatchedState) -> None:
        updates, self._updates = self._updates, 0
        on_device, _ = link.read_state()
        for parameter, path in self._parameters():
            values = {
                name: on_device[f"{prefix}___{path}"]
                for prefix, name in self._names.items()
                if f"{prefix}___{path}" in on_device
            }
            if self._counted and values:
                before = dict.get(watched, parameter, {}).get("step", 0.0)
                counted = torch.as_tensor(before, dtype=torch.float32) + updates
                values["step"] = on_device.get(f"{_STEP}___{path}", counted)
            if values:
                watched.fill(parameter, values)
        self._remember()
        self.host_state_is_dirty = False

    def get_state_dict(self) -> dict[str, Any]:
        """Return the state under the names of ``ipu_state``; zeros where there is none."""
        state: dict[str, torch.Tensor] = {}
        for parameter, path in self._parameters():
            entry = dict.get(self._optimizer.state, parameter) or {}
            for prefix, name in self._names.items():
                value = entry.get(name)
                state[f"{prefix}___{path}"] = (
                    torch.zeros_like(parameter) if value is None else value
                )
            steps = entry.get("step", 1.0 if entry else 0.0)
            state[f"{_STEP}___{path}"] = torch.as_tensor(steps, dtype=torch.float32)
        link = self._link() if self._link is not None else None
        rest = {} if link is None else link.read_state()[0]
        return {"ipu_state": {**rest, **state}, "ipu_param": {}}

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if address(parameter) in self.paths:
                    yield parameter, self.paths[address(parameter)]
