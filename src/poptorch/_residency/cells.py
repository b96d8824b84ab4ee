"""Track the regions of host memory that devices have copied, and which copy is newest.

If models share tensors, their copies belong to the same cells. When values are copied from one
device to the host, they are newer than the copies of all others, so no code needs to know which
model trained last.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .._base.thread_safety import RenewedLock
from .._ir.program import Writes
from .access import unwatch, unwatched, watch
from .coherence_table import TABLE, Coherence, CopyDirection, Event
from .locks import Lock

T = TypeVar("T")
Region = tuple[int, int, int]  # storage, first byte, end
_cells: weakref.WeakValueDictionary[Region, Cell] = weakref.WeakValueDictionary()
_storages: weakref.WeakValueDictionary[int, weakref.WeakSet[Cell]] = weakref.WeakValueDictionary()
_making = RenewedLock()  # for creating cells and devices; no call takes it


class WeakList(list[weakref.ref[T]]):
    """A list of live objects. Unlike a WeakSet, other threads may add to it during an iteration."""

    def add(self, item: T) -> None:
        self.append(weakref.ref(item, self.remove))

    def living(self) -> list[T]:
        return [item for item in [reference() for reference in self.copy()] if item is not None]


class Cell:
    """A region of host memory. Tied weights and views of it share the cell.

    Attributes:
        copies: the copies on devices.
        devices: devices of wrapped models that have a tensor there.
    """

    def __init__(self, region: Region) -> None:
        self.copies, self.devices = WeakList[Copy](), WeakList[DeviceCopies]()
        self._region, self._hosts = region, WeakList[torch.Tensor]()
        self._overlapping = WeakList[Cell]()  # cells that share bytes with this one
        # all cells in the storage
        self._storage = _storages.setdefault(region[0], weakref.WeakSet())

    @classmethod
    def of(cls, host: torch.Tensor) -> Cell:
        region = _region(host)
        with _making.now:
            cell = _cells.get(region)
            if cell is None or not cell.hosts():  # its tensors no longer exist
                cell = _cells[region] = cls(region)
                cell._find_overlapping()
            if all(host is not each for each in cell.hosts()):
                cell._hosts.add(host)
                for copy in cell.overlapping_copies():
                    if copy.state is Coherence.DEVICE_NEWER:
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
        """Return the tensors in this region."""
        return [host for host in self._hosts.living() if _region(host) == self._region]

    def overlapping(self) -> list[Cell]:
        """Return this cell and those that overlap it."""
        return [self, *self._overlapping.living()]

    def overlapping_copies(self) -> list[Copy]:
        return [copy for cell in self.overlapping() for copy in cell.copies.living()]

    def other_hosts(self, own: torch.Tensor | None) -> list[torch.Tensor]:
        """Return other tensors whose values change together with those of a given one."""
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

    device: DeviceCopies
    cell: Cell
    host: Callable[[], torch.Tensor | None]  # a weak reference
    address: int  # address of the host tensor
    value: torch.Tensor  # on the device
    version: int | None = None  # version of the host tensor when both had the same values
    state: Coherence = Coherence.SAME

    def is_of(self, host: torch.Tensor) -> bool:
        return self.host() is host and self.address == _address(host)

    def differs_from(self, host: torch.Tensor) -> bool:
        """Return whether the host tensor was written since the last transfer."""
        if self.state in (Coherence.HOST_NEWER, Coherence.DEVICE_ONLY) or (
            host is self.host() and (self.version is None or self.version == host._version)
        ):
            return False
        value = self.value
        if value.is_meta or host.is_meta or not host.data_ptr():
            return False
        if value.dim() == host.dim() + 1:  # replicas have their own values; the host has the first
            value = value[0]
        return value.shape != host.shape or not torch.equal(host.detach().to(value), value)


@dataclass(eq=False)
class DeviceCopies:
    """The copies of host tensors on one model's device, by the paths that the tensors had.

    A copy belongs to one tensor, even if the user moves that tensor or replaces it.

    Attributes:
        announce: copies newer values to the host, before a host tensor is read.
        trains: whether the model writes weights.
        lock: the lock that this device shares with those with which it exchanges values.
        near: the devices among these that share tensors with it.
        writes: the writes to state of the model's programs.
        newer: the number of tensors that must be copied to the host before they are read.
        stale: the number of tensors for which the host has values from another device.
    """

    announce: Callable[[], object]
    trains: bool
    lock: Lock = field(default_factory=Lock)
    near: WeakList[DeviceCopies] = field(default_factory=WeakList)
    copies: dict[str, Copy] = field(default_factory=dict)
    writes: Writes = field(default_factory=Writes)
    newer: int = 0
    stale: int = 0
    _marked: object = None  # the paths that the last update wrote, if nothing has happened since
    _known: int = 0  # sum of the versions when host and device had the same values
    _cells: set[Cell] = field(default_factory=set)  # the cells of the model's tensors

    def meet(self, hosts: Mapping[str, torch.Tensor]) -> None:
        """Find devices that use the same host memory, if one of both models trains."""
        cells = {Cell.of(host) for path, host in hosts.items() if not self._has(path, host)}
        if cells <= self._cells:
            return
        known = {self, *self.near.living()}
        with _making.now:
            self._cells |= cells
            sources = {device for cell in cells for each in cell.overlapping()
                     for device in each.devices.living()}  # fmt: skip
            near = [device for device in sources if device not in known
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
        """Return the tensor for a path, or None if it no longer exists."""
        copy = self.copies.get(path)
        return None if copy is None else copy.host()

    def state(self, path: str) -> Coherence:
        copy = self.copies.get(path)
        return Coherence.HOST_ONLY if copy is None else copy.state

    def due(self, event: Event, paths: Iterable[str]) -> list[str]:
        """Return those of some tensors that an event transfers."""
        return [p for p in paths if TABLE[event, self.state(p)].transfer is not CopyDirection.NONE]

    def moved(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record that an event has transferred these tensors, given as pairs of both sides."""
        unwatched(self._note, event, pairs)

    def lost(self, event: Event, paths: Iterable[str]) -> None:
        """Record that values were dropped because no tensor for them exists any more."""
        for path in paths:
            copy = self.copies[path]
            self._set(copy, TABLE[event, copy.state].state)

    def leave(self, paths: Iterable[str]) -> None:
        """Forget tensors that were replaced and whose values were copied to the host."""
        for path in paths:
            self._set(self.copies.pop(path), Coherence.HOST_ONLY)

    def _note(self, event: Event, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.meet({path: host for path, (host, _) in pairs.items()})
        for other in self.near.living():
            other._follow_hosts()
        for path, (host, value) in pairs.items():
            row = TABLE[event, self.state(path)]
            self._put(path, host, value, row.state)
            if row.transfer is CopyDirection.DOWN:
                self._notify_others(self.copies[path])
        self._known = sum(copy.version or 0 for copy in self.copies.values())

    def _put(self, path: str, host: torch.Tensor, value: torch.Tensor, state: Coherence) -> None:
        copy = self.copies.get(path)
        if copy is None or not copy.is_of(host):
            if copy is not None:
                self._set(copy, Coherence.HOST_ONLY)
            copy = Copy(self, Cell.of(host), weakref.ref(host), _address(host), value)
            self.copies[path] = copy
            copy.cell.copies.add(copy)
        copy.value = value
        self._set(copy, state)
        copy.version = None if host.is_inference() else host._version

    def _set(self, copy: Copy, state: Coherence) -> None:
        if state is copy.state:
            return
        self._marked = None
        newer = (state is Coherence.DEVICE_NEWER) - (copy.state is Coherence.DEVICE_NEWER)
        self.newer += newer
        self.stale += (state is Coherence.HOST_NEWER) - (copy.state is Coherence.HOST_NEWER)
        if newer:
            own = copy.host()
            for host in (own, *copy.cell.other_hosts(own)):
                if newer < 0:
                    unwatch(host)
                elif host is not None:
                    watch(host, self.announce)
        copy.state = state

    def _follow_hosts(self) -> None:
        """Look up the memory of tensors again, because the user may have changed it."""
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

    def _notify_others(self, copy: Copy) -> None:
        for other in copy.cell.overlapping_copies():
            if other.device is not self:
                other.device._set(other, TABLE[Event.OTHER_TO_HOST, other.state].state)

    def updated(self, event: Event, paths: Collection[str]) -> list[tuple[Copy, Coherence]]:
        """Record that a program is about to write these. Return what ``undo`` needs if it
        does not.
        """
        if self._marked is paths:
            return []
        before = [(self.copies[path], self.copies[path].state) for path in paths
                  if path in self.copies]  # fmt: skip
        for copy, state in before:
            self._set(copy, TABLE[event, state].state)
        self._marked = paths
        return before

    def undo(self, before: Iterable[tuple[Copy, Coherence]]) -> None:
        for copy, state in before:
            self._set(copy, state)

    def fetch(self) -> None:
        """Copy values to the host for which other devices are newer."""
        for other in self.near.living():
            if other.newer:
                other.announce()

    def hold(self, values: Mapping[str, torch.Tensor]) -> None:
        """Use the tensors of another program from now on."""
        for path, copy in self.copies.items():
            copy.value = values.get(path, copy.value)

    def clear(self) -> None:
        """Forget everything, because the device is gone."""
        for copy in self.copies.values():
            self._set(copy, Coherence.HOST_ONLY)
        self.copies, self._known, self.writes = {}, 0, Writes()

    def is_untouched(self) -> bool:
        """Return whether torch has counted no writes to the host tensors since the last
        transfer.
        """
        versions = 0
        for copy in self.copies.values():
            if copy.version is not None and (host := copy.host()) is not None:
                versions += host._version
        return versions == self._known

    def settle(self) -> None:
        """Accept the present values of the host tensors as those of the last transfer."""
        for copy in self.copies.values():
            host = copy.host()
            if host is None or copy.version is not None:
                copy.version = None if host is None else host._version
        self._known = sum(copy.version or 0 for copy in self.copies.values())

    def by_host(self) -> dict[int, Copy]:
        """Return the copies by the identities of their host tensors, for comparison."""
        self.writes.restore()
        hosts = ((copy.host(), copy) for copy in self.copies.values())
        return {id(host): copy for host, copy in hosts if host is not None}
