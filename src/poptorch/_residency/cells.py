"""Cells: regions of the host's memory that devices have copies of, and who is newer of each.

Models whose tensors are common meet in the cells: what comes down from one device is newer than
the copies of all others, so that nobody has to ask which model trained last.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .._base.threads import RenewedLock
from .._ir.program import Writes
from .access import unwatch, unwatched, watch
from .locks import Lock
from .table import TABLE, Event, State, Transfer

T = TypeVar("T")
Region = tuple[int, int, int]  # storage, first byte, the one past the last
_cells: weakref.WeakValueDictionary[Region, Cell] = weakref.WeakValueDictionary()
_storages: weakref.WeakValueDictionary[int, weakref.WeakSet[Cell]] = weakref.WeakValueDictionary()
_making = RenewedLock()  # of cells and devices; no call takes it


class WeakList(list[weakref.ref[T]]):
    """Objects that are still alive; other threads may add to it meanwhile, unlike to a WeakSet."""

    def add(self, item: T) -> None:
        self.append(weakref.ref(item, self.remove))

    def living(self) -> list[T]:
        return [item for item in [reference() for reference in self.copy()] if item is not None]


class Cell:
    """One region of the host's memory: ties and views of it meet here.

    Attributes:
        copies: what devices have of it.
        devices: of wrapped models that have a tensor there.
    """

    def __init__(self, region: Region) -> None:
        self.copies, self.devices = WeakList[Copy](), WeakList[Device]()
        self._region, self._hosts = region, WeakList[torch.Tensor]()
        self._overlapping = WeakList[Cell]()  # others that share bytes
        self._storage = _storages.setdefault(region[0], weakref.WeakSet())  # all cells in it

    @classmethod
    def of(cls, host: torch.Tensor) -> Cell:
        region = _region(host)
        with _making.now:
            cell = _cells.get(region)
            if cell is None or not cell.hosts():  # tensors that are gone lay there
                cell = _cells[region] = cls(region)
                cell._find_overlapping()
            if all(host is not each for each in cell.hosts()):
                cell._hosts.add(host)
                for copy in cell.overlapping_copies():
                    if copy.state is State.DEVICE_NEWER:
                        watch(host, copy.device.announce)
        return cell

    def _find_overlapping(self) -> None:
        _, start, end = self._region
        for other in self._storage:
            if start < other._region[2] and other._region[1] < end and other.hosts():
                self._overlapping.add(other)
                other._overlapping.add(self)
        self._storage.add(self)

    def hosts(self) -> list[torch.Tensor]:
        """Return the tensors that lie there."""
        return [host for host in self._hosts.living() if _region(host) == self._region]

    def overlapping(self) -> list[Cell]:
        """Return this cell and those that share a part of it."""
        return [self, *self._overlapping.living()]

    def overlapping_copies(self) -> list[Copy]:
        return [copy for cell in self.overlapping() for copy in cell.copies.living()]

    def other_hosts(self, own: torch.Tensor | None) -> list[torch.Tensor]:
        """Return tensors whose values change with those of one that lies there."""
        if len(self._hosts) == 1 and not self._overlapping:
            return []
        return [host for cell in self.overlapping() for host in cell.hosts() if host is not own]


def _region(host: torch.Tensor) -> Region:
    return unwatched(_bytes, host)  # type: ignore[no-any-return]


def _address(host: torch.Tensor) -> int:
    return host.data_ptr() if host.layout is torch.strided and not host.is_meta else 0


def _bytes(host: torch.Tensor) -> Region:
    first = _address(host)
    if not first:
        return id(host), 0, 1
    last = sum((size - 1) * step for size, step in zip(host.shape, host.stride(), strict=True))
    return host.untyped_storage().data_ptr(), first, first + (last + 1) * host.itemsize


@dataclass(eq=False, slots=True, weakref_slot=True)
class Copy:
    """One device's copy of a cell."""

    device: Device
    cell: Cell
    host: Callable[[], torch.Tensor | None]  # weakly
    address: int  # of the host's tensor
    value: torch.Tensor  # on the device
    version: int | None = None  # of the host's tensor when both had the same values
    state: State = State.SAME

    def is_of(self, host: torch.Tensor) -> bool:
        return self.host() is host and self.address == _address(host)

    def differs_from(self, host: torch.Tensor) -> bool:
        """Whether somebody has put other values into the host than those that last travelled."""
        if self.state in (State.HOST_NEWER, State.DEVICE_ONLY) or (
            host is self.host() and (self.version is None or self.version == host._version)
        ):
            return False
        value = self.value
        if value.is_meta or host.is_meta or not host.data_ptr():
            return False
        return value.shape != host.shape or not torch.equal(host.detach().to(value), value)


@dataclass(eq=False)
class Device:
    """What one model's device has of the tensors of the host, by the paths that they had.

    A copy is one tensor's, which it stays wherever the user moves the tensor or puts another one.

    Attributes:
        announce: brings newer values down: somebody is about to read the host's.
        trains: whether it writes weights.
        lock: of this one and of those that it exchanges values with.
        near: those of them that it has tensors in common with.
        writes: of the programs' states there.
        newer: the number of tensors that a read of the host has to bring down.
        stale: of those of which another device's values have come to the host.
    """

    announce: Callable[[], object]
    trains: bool
    lock: Lock = field(default_factory=Lock)
    near: WeakList[Device] = field(default_factory=WeakList)
    copies: dict[str, Copy] = field(default_factory=dict)
    writes: Writes = field(default_factory=Writes)
    newer: int = 0
    stale: int = 0
    _marked: object = None  # the paths that the last update wrote, if nothing happened since
    _known: int = 0  # sum of the versions when host and device had the same values
    _cells: set[Cell] = field(default_factory=set)  # of the model's tensors

    def meet(self, hosts: Mapping[str, torch.Tensor]) -> None:
        """Find those who use the same memory of the host, where one of both trains."""
        cells = {Cell.of(host) for path, host in hosts.items() if not self._has(path, host)}
        if cells <= self._cells:
            return
        known = {self, *self.near.living()}
        with _making.now:
            self._cells |= cells
            there = {device for cell in cells for each in cell.overlapping()
                     for device in each.devices.living()}  # fmt: skip
            near = [device for device in there if device not in known
                    and (device.trains or self.trains)]  # fmt: skip
            for cell in cells:
                cell.devices.add(self)
            for other in near:
                self.near.add(other)
                other.near.add(self)
        for other in near:
            self.lock.join(other.lock)

    def _has(self, path: str, host: torch.Tensor) -> bool:
        copy = self.copies.get(path)
        return copy is not None and unwatched(copy.is_of, host)

    def host(self, path: str) -> torch.Tensor | None:
        """Return the tensor that the device has under a path; None if nobody has it any more."""
        copy = self.copies.get(path)
        return None if copy is None else copy.host()

    def state(self, path: str) -> State:
        copy = self.copies.get(path)
        return State.HOST_ONLY if copy is None else copy.state

    def due(self, event: Event, paths: Iterable[str]) -> list[str]:
        """Return those of some tensors that an event moves."""
        return [p for p in paths if TABLE[event, self.state(p)].transfer is not Transfer.NONE]

    def moved(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note that an event has moved these tensors, of which both sides are given."""
        unwatched(self._note, event, pairs)

    def lost(self, event: Event, paths: Iterable[str]) -> None:
        """Note that an event found nobody any more who would have taken these values."""
        for path in paths:
            copy = self.copies[path]
            self._set(copy, TABLE[event, copy.state].state)

    def leave(self, paths: Iterable[str]) -> None:
        """These tensors are others now, and their values have come down."""
        for path in paths:
            self._set(self.copies.pop(path), State.HOST_ONLY)

    def _note(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.meet({path: host for path, (host, _) in pairs.items()})
        for other in self.near.living():
            other._follow_hosts()
        for path, (host, value) in pairs.items():
            row = TABLE[event, self.state(path)]
            self._put(path, host, value, row.state)
            if row.transfer is Transfer.DOWN:
                self._tell_others(self.copies[path])
        self._known = sum(copy.version or 0 for copy in self.copies.values())

    def _put(self, path: str, host: torch.Tensor, value: torch.Tensor, state: State) -> None:
        copy = self.copies.get(path)
        if copy is None or not copy.is_of(host):
            if copy is not None:
                self._set(copy, State.HOST_ONLY)
            copy = Copy(self, Cell.of(host), weakref.ref(host), _address(host), value)
            self.copies[path] = copy
            copy.cell.copies.add(copy)
        copy.value = value
        self._set(copy, state)
        copy.version = None if host.is_inference() else host._version

    def _set(self, copy: Copy, state: State) -> None:
        if state is copy.state:
            return
        self._marked = None
        newer = (state is State.DEVICE_NEWER) - (copy.state is State.DEVICE_NEWER)
        self.newer += newer
        self.stale += (state is State.HOST_NEWER) - (copy.state is State.HOST_NEWER)
        if newer:
            own = copy.host()
            for host in (own, *copy.cell.other_hosts(own)):
                if newer < 0:
                    unwatch(host)
                elif host is not None:
                    watch(host, self.announce)
        copy.state = state

    def _follow_hosts(self) -> None:
        """Look for tensors where they are: the user may have given them other memory since."""
        hosts = {path: copy.host() for path, copy in self.copies.items()}
        moved = {
            path: host
            for path, host in hosts.items()
            if host is not None and not self._has(path, host)
        }
        self.meet(moved)
        for path, host in moved.items():
            copy = dataclasses.replace(
                self.copies[path], cell=Cell.of(host), address=_address(host)
            )
            self.copies[path] = copy
            copy.cell.copies.add(copy)

    def _tell_others(self, copy: Copy) -> None:
        for other in copy.cell.overlapping_copies():
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
        for other in self.near.living():
            if other.newer:
                other.announce()

    def hold(self, values: Mapping[str, torch.Tensor]) -> None:
        """Another program goes on, with these tensors."""
        for path, copy in self.copies.items():
            copy.value = values.get(path, copy.value)

    def clear(self) -> None:
        """The device is gone."""
        for copy in self.copies.values():
            self._set(copy, State.HOST_ONLY)
        self.copies, self._known, self.writes = {}, 0, Writes()

    def is_untouched(self) -> bool:
        """Whether torch has counted no writes to the host's tensors since they last travelled."""
        hosts = [copy.host() for copy in self.copies.values() if copy.version is not None]
        return sum(host._version for host in hosts if host is not None) == self._known

    def settle(self) -> None:
        """The host's tensors have the values that last travelled, whoever wrote them since."""
        for copy in self.copies.values():
            host = copy.host()
            if host is None or copy.version is not None:
                copy.version = None if host is None else host._version
        self._known = sum(copy.version or 0 for copy in self.copies.values())

    def by_host(self) -> dict[int, Copy]:
        """Return the copies by the identities of their tensors, ready to be compared."""
        self.writes.restore()
        hosts = ((copy.host(), copy) for copy in self.copies.values())
        return {id(host): copy for host, copy in hosts if host is not None}
