"""Provide ``optimizer.state`` of torch's optimizers, reading it from the device only when it is
accessed.

Changes to tensors that were read since the last call are written to the device by the next call.
"""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._base import log
from ..._residency import unwatched
from ...optim.freeze_optimizer import path_of
from ...optim.optimizer import DeviceState
from ..wrapping import announce_in

NAMES = {
    "sgd": {"Accl1": "momentum_buffer"},
    "adam": {"Accl1": "exp_avg", "Accl2": "exp_avg_sq"},
    "adamw": {"Accl1": "exp_avg", "Accl2": "exp_avg_sq"},
    "rmsprop": {"Accl1": "square_avg", "Accl2": "grad_avg", "Accl3": "momentum_buffer"},
}
_STEP = "Step"
_version_of = operator.attrgetter("_version")


def _nothing() -> None:
    pass


class WatchedState(collections.defaultdict[Any, Any]):
    """The dict that replaces ``optimizer.state``. Copies and pickles of it are plain dicts."""

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        super().__init__(dict, entries)
        # weak, so that they keep no device alive
        self.listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.changed = False

    def _announce(self, changes: bool) -> None:
        for listener in self.listeners:
            (listener() or _nothing)()
        self.changed |= changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.defaultdict, (dict, dict(self.items()))

    def __copy__(self) -> Any:
        return collections.defaultdict(dict, self.items())

    copy = __copy__


announce_in(WatchedState, "__getitem__ __contains__ __iter__ __len__ __eq__ get items keys values")
announce_in(WatchedState, "__setitem__ __delitem__ clear pop popitem setdefault update", True)


class TorchState(DeviceState):
    """The state of torch optimizers, with the same interface as that of
    ``poptorch.optim.Optimizer``.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[str, str], counted: bool
    ) -> None:
        self._optimizers = optimizers
        self._names, self._counted = names, counted
        self._watched = self._states()  # WatchedState objects after the first device
        self._watching: list[tuple[Any, Any]] = []  # the same, each with its optimizer
        self._watches = False
        self._paths: Mapping[int, str] = {}  # paths of the parameters on the last device
        self._updates = 0  # number of updates since the state was read
        self.steps: Mapping[str, float] = {}  # earlier steps by path, of a run that is continued
        self._read: list[Any] = []  # what was last read from the device
        self._tensors: list[torch.Tensor] = []  # the tensors in it
        self._versions = 0  # the sum of their versions when they were read

    @property
    def was_loaded(self) -> bool:
        """Return whether ``load_state_dict`` was called, which also changes hyper-parameters."""
        return any(map(operator.is_not, self._states(), self._watched))

    def _states(self) -> list[Any]:
        return [each.state for each in self._optimizers]

    @property
    def ipu_state_is_dirty(self) -> bool:
        if not self._watches:
            return False
        loaded = self.was_loaded or any(each.changed for each in self._watched)
        return loaded or (bool(self._read) and not self.host_state_is_dirty and self._edited())

    @ipu_state_is_dirty.setter
    def ipu_state_is_dirty(self, value: bool) -> None:
        assert not value
        self.steps = {}
        self._watch()

    def _is_settled(self) -> bool:
        if self._read or not self._watches:
            return super()._is_settled()
        # this is evaluated before each call, and usually nothing has been read
        for optimizer, watched in self._watching:
            if optimizer.state is not watched or watched.changed:
                return False
        return True

    def _entries(self) -> list[Any]:
        entries = itertools.chain.from_iterable(map(dict.values, self._states()))
        dicts = (entry for entry in entries if type(entry) is dict)
        return list(itertools.chain.from_iterable(map(dict.values, dicts)))

    def _remember(self) -> None:
        self._read = self._entries()
        tensors = [value for value in self._read if isinstance(value, torch.Tensor)]
        self._tensors = [value for value in tensors if not value.is_inference()]
        self._versions = self._sum_of_versions()

    def _sum_of_versions(self) -> int:
        return sum(map(_version_of, self._tensors))

    def _edited(self) -> bool:
        """Return whether what was read has been changed since. This is fast enough for
        every call.
        """
        now = self._entries()
        same = len(now) == len(self._read) and all(map(operator.is_, now, self._read))
        return not same or self._sum_of_versions() != self._versions

    @property
    def _has_lost_edits(self) -> bool:
        """Return whether tensors that were read have been changed after the device went on."""
        is_older = self.host_state_is_dirty and bool(self._read)
        return is_older and self._sum_of_versions() != self._versions

    def _warn_of_lost_edits(self) -> None:
        if self._has_lost_edits:
            self._remember()
            log.python.warning(
                "You changed tensors of the optimizer state that you had read before the "
                "last call. The device does not receive these changes. Read the tensors from "
                "optimizer.state again after a call, and then change them"
            )

    def has_state(self) -> bool:
        return any(any(dict.values(state)) for state in self._states())

    def _watch(self) -> None:
        own = weakref.WeakMethod(self._synchronise)
        for each in self._optimizers:
            if not isinstance(each.state, WatchedState):
                each.state = WatchedState(each.state)
            others = (one for one in each.state.listeners if one != own and one() is not None)
            each.state.listeners = [*others, own]
            each.state.changed = False
        self._watched, self._watches = self._states(), True
        self._watching = [(each, each.state) for each in self._optimizers]
        self._updates = 0
        self._read = []

    def _ran(self, updates: int) -> None:
        self.host_state_is_dirty = True
        self._updates += updates

    def _attach_device(self, link: Any) -> None:
        super()._attach_device(link)
        if not self._watches:
            self._watch()

    def _read_from(self, link: Any) -> None:
        on_device, _ = link.read_state()
        updates, self._updates = self._updates, 0
        for number, parameter, path in self._parameters():
            watched = self._watched[number]
            values = {
                name: on_device[f"{prefix}___{path}"]
                for prefix, name in self._names.items()
                if f"{prefix}___{path}" in on_device
            }
            if self._counted and values:
                counted = self._steps_before(number, parameter, path) + updates
                values["step"] = on_device.get(f"{_STEP}___{path}", counted)
            if values:
                dict.setdefault(watched, parameter, {}).update(values)
        self.steps = {}
        self._remember()

    def _steps_before(self, number: int, parameter: torch.Tensor, path: str) -> torch.Tensor:
        entry = dict.get(self._watched[number], parameter) or {}
        return torch.as_tensor(entry.get("step", self.steps.get(path, 0.0)), dtype=torch.float32)

    def count(self) -> dict[str, float]:
        """Return how many steps each weight has made, by path, without reading from the device."""
        if not self._counted:
            return {}
        return {
            path: float(self._steps_before(number, parameter, path)) + self._updates
            for number, parameter, path in self._parameters()
        }

    def get_state_dict(self) -> dict[str, Any]:
        """Return the state under the names of ``ipu_state``; zeros if there is no state."""
        if self.was_loaded:  # state that was not loaded is newer on the device
            self._synchronise()
        state: dict[str, torch.Tensor] = {}
        for number, parameter, path in self._parameters():
            entry = dict.get(self._optimizers[number].state, parameter) or {}
            for prefix, name in self._names.items():
                value = entry.get(name)
                state[f"{prefix}___{path}"] = (
                    unwatched(torch.zeros_like, parameter) if value is None else value
                )
            steps = entry.get("step", 1.0 if entry else 0.0)
            state[f"{_STEP}___{path}"] = torch.as_tensor(steps, dtype=torch.float32)
        rest = {} if self._link is None else self._link.read_state()[0]
        return {"ipu_state": {**rest, **state}, "ipu_param": {}}

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor, str]]:
        """Yield all parameters of the model, each with the index of its optimizer."""
        if self._link is not None:
            self._paths = self._link.paths
        for number, optimizer in enumerate(self._optimizers):
            for parameter in itertools.chain(*(each["params"] for each in optimizer.param_groups)):
                path = path_of(parameter, self._paths)
                if path is not None:
                    yield number, parameter, path
