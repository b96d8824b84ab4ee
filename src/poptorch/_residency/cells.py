"""Cells: regions of the host's memory that devices have copies of, and who is newer of each.

Models whose tensors are common meet in the cells: what comes down from one device is newer than
the copies of all others, so that nobody has to ask which model trained last.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .._base.threads import RenewedLock
from .access import unwatch, unwatched, watch
from .locks import Lock
from .table import TABLE, Event, State, Transfer

Region = tuple[int, torch.Size, tuple[int, ...]]
_cells: weakref.WeakValueDictionary[Region, Cell] = weakref.WeakValueDictionary()
_devices: weakref.WeakSet[Device] = weakref.WeakSet()  # of wrapped models
_making = RenewedLock()  # of cells and devices; no call takes it


class Cell:
    """One region of the host's memory: ties and views of it meet here."""

    def __init__(self, host: torch.Tensor, region: Region) -> None:
        self._host, self._region = weakref.ref(host), region
        self.copies: weakref.WeakSet[Copy] = weakref.WeakSet()

    @classmethod
    def of(cls, host: torch.Tensor) -> Cell:
        region = _region(host)
        with _making.now:
            cell = _cells.get(region)
            if cell is None or cell._host() is None:  # a tensor that is gone lay there
                cell = _cells[region] = cls(host, region)
        return cell

    def lies_at(self, host: torch.Tensor) -> bool:
        return self._region == _region(host)


def _region(host: torch.Tensor) -> Region:
    if host.layout is not torch.strided:
        return id(host), host.shape, ()
    address = id(host) if host.is_meta or not host.numel() else host.data_ptr()
    return address, host.shape, host.stride()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Copy:
    """One device's copy of a cell."""

    device: Device
    cell: Cell
    host: Callable[[], torch.Tensor | None]  # weakly
    value: torch.Tensor  # on the device
    version: int | None = None  # of the host's tensor when both had the same values
    state: State = State.SAME

    def differs_from(self, host: torch.Tensor) -> bool:
        """Whether somebody has put other values into the host than those that last travelled."""
        if self.state in (State.HOST_NEWER, State.DEVICE_ONLY) or (
            host is self.host() and self.version in (None, host._version)
        ):
            return False
        value = self.value
        if value.is_meta or value.shape != host.shape or not host.data_ptr():
            return False
        return not torch.equal(host.detach().to(value.dtype), value)


@dataclass(eq=False)
class Device:
    """What one model's device has of the tensors of the host, by path.

    Attributes:
        announce: brings newer values down: somebody is about to read the host's.
        lock: of this one and of those that it exchanges values with.
        near: those of them that it has tensors in common with.
    """

    announce: Callable[[], object]
    lock: Lock = field(default_factory=Lock)
    near: list[weakref.ref[Device]] = field(default_factory=list)
    copies: dict[str, Copy] = field(default_factory=dict)
    _counts: collections.Counter[State] = field(default_factory=collections.Counter)
    _marked: object = None  # the paths that the last update wrote, if nothing happened since
    _known: int = 0  # sum of the versions when host and device had the same values
    _hosts: frozenset[Region] = frozenset()  # of the tensors when the model was wrapped
    _trains: bool = False

    def meet(self, hosts: Iterable[torch.Tensor], trains: bool) -> None:
        """Find whoever uses the same tensors of the host, where one of both trains."""
        self._hosts, self._trains = frozenset(map(_region, hosts)), trains
        with _making.now:
            near = [device for device in _devices if (device._trains or trains)
                    and not self._hosts.isdisjoint(device._hosts)]  # fmt: skip
            if near:
                self.lock = near[0].lock  # nobody has the one that goes
            _devices.add(self)
            for other in near:
                self.near.append(weakref.ref(other, self.near.remove))
                other.near.append(weakref.ref(self, other.near.remove))
        for other in near[1:]:
            self.lock.join(other.lock)

    @property
    def newer(self) -> bool:
        """Whether a read of the host has to bring values down."""
        return self._counts[State.DEVICE_NEWER] > 0

    @property
    def stale(self) -> bool:
        """Whether another device's values have come to the host."""
        return self._counts[State.HOST_NEWER] > 0

    def state(self, path: str) -> State:
        copy = self.copies.get(path)
        return State.HOST_ONLY if copy is None else copy.state

    def due(self, event: Event, paths: Iterable[str]) -> list[str]:
        """Return those of some tensors that an event moves."""
        return [p for p in paths if TABLE[event, self.state(p)].transfer is not Transfer.NONE]

    def moved(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note that an event has moved these tensors, of which both sides are given."""
        unwatched(self._note, event, pairs)

    def _note(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for path, (host, value) in pairs.items():
            row = TABLE[event, self.state(path)]
            self._put(path, host, value, row.state)
            if row.transfer is Transfer.DOWN:
                self._tell_others(self.copies[path])
        self._known = sum(copy.version or 0 for copy in self.copies.values())

    def _put(self, path: str, host: torch.Tensor, value: torch.Tensor, state: State) -> None:
        copy = self.copies.get(path)
        if copy is None or copy.host() is not host or not copy.cell.lies_at(host):
            if copy is not None:
                self._set(copy, State.HOST_ONLY)
            copy = self.copies[path] = Copy(self, Cell.of(host), weakref.ref(host), value)
            copy.cell.copies.add(copy)
            self._counts[State.SAME] += 1
        copy.value = value
        self._set(copy, state)
        copy.version = None if host.is_inference() else host._version

    def _set(self, copy: Copy, state: State) -> None:
        if state is copy.state:
            return
        self._marked = None
        self._counts[copy.state] -= 1
        self._counts[state] += 1
        host = copy.host()
        if host is not None and State.DEVICE_NEWER in (copy.state, state):
            if state is State.DEVICE_NEWER:
                watch(host, self.announce)
            else:
                unwatch(host)
        copy.state = state

    def _tell_others(self, copy: Copy) -> None:
        copies = copy.cell.copies
        for other in list(copies) if len(copies) > 1 else ():
            if other.device is not self:
                other.device._set(other, TABLE[Event.OTHER_TO_HOST, other.state].state)

    def updated(self, event: Event, paths: Collection[str]) -> list[tuple[Copy, State]]:
        """A program is about to write these; return what ``undo`` takes if it does not."""
        if self._marked is paths:
            return []
        before = [(self.copies[path], self.copies[path].state) for path in paths
                  if path in self.copies]  # fmt: skip
        for copy, state in before:
            self._set(copy, TABLE[event, state].state)
        self._marked = paths
        return before

    def undo(self, before: Iterable[tuple[Copy, State]]) -> None:
        for copy, state in before:
            self._set(copy, state)

    def fetch(self) -> None:
        """Bring to the host what other devices have newer values of."""
        for reference in [*self.near]:
            other = reference()
            if other is not None and other.newer:
                other.announce()

    def hold(self, values: Mapping[str, torch.Tensor]) -> None:
        """Another program goes on, with these tensors."""
        for path, copy in self.copies.items():
            copy.value = values.get(path, copy.value)

    def clear(self) -> None:
        """The device is gone."""
        for copy in self.copies.values():
            self._set(copy, State.HOST_ONLY)
        self.copies, self._counts, self._known = {}, collections.Counter(), 0

    def is_untouched(self) -> bool:
        """Whether torch has counted no writes to the host's tensors since they last travelled."""
        hosts = [copy.host() for copy in self.copies.values() if copy.version is not None]
        return sum(host._version for host in hosts if host is not None) == self._known

    def edited(self, hosts: Mapping[str, torch.Tensor]) -> list[str]:
        """Return those whose host's tensor is another one by now, or has other values."""
        return [path for path, copy in self.copies.items()
                if path in hosts and copy.differs_from(hosts[path])]  # fmt: skip
