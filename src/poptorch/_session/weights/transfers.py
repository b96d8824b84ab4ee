"""Decide when weights and buffers are copied between host and device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from ... import _capture
from ..._base import interrupts, log
from ..._base.errors import Error
from ..._compile import agreement
from ..._residency import DeviceCopies, Event, locked
from ..host_changes import PeriodicChecks, weights_check
from ..programs import Programs, Specialization
from ..wrapping import Owner
from .store import StateStore


class Transfers:
    """The transfers of one wrapped model. Public methods hold its lock.

    Automatic transfers call the methods of the owner, so that users can override these.
    """

    def __init__(
        self,
        module: nn.Module,
        trains: bool,
        programs: Programs,
        owner: Callable[[], Owner | None],
    ) -> None:
        own = weakref.ref(self)
        self.device = DeviceCopies(lambda: _bring_up_to_date(own()), trains)
        tensors = _capture.tensors_of(module)
        self.device.meet({path: tied.tensor for path, tied in tensors.items()})
        self.lock = self.device.lock
        self.store: StateStore | None = None  # while attached
        # the store of each program, from its first use; all stores share the tensors of weights
        self._stores = weakref.WeakKeyDictionary[Specialization, StateStore]()
        self.periodic_checks = PeriodicChecks(weights_check(self.device, module))
        # whether the processes of the job have started with the same weights
        self.has_agreed = False
        self._trains, self._programs, self._owner = trains, programs, owner
        self._taking_over = self._is_copying = False
        # digests of written weights since the processes last compared them
        self.written: Mapping[str, str] | None = None
        # digests of the host's weights at the time of detaching
        self._left: Mapping[str, str] | None = None

    @property
    def attached(self) -> StateStore:
        assert self.store is not None
        return self.store

    def begin(self) -> None:
        """Start with another first program, or none. Nothing is on the device."""
        self.store = self.written = self._left = None
        self._stores.clear()
        self.has_agreed = False
        self.device.clear()

    def attach(self, program: Specialization, store: StateStore) -> None:
        if self._left is not None and self._left != (digests := store.digests()):
            self.written = digests
        self.store, self._left = store, None
        self._stores[program] = store
        self.adopted()

    def store_for(self, program: Specialization) -> StateStore:
        """Return the tensors of another program on the device, with the present state."""
        store, now = self._stores.get(program), self.attached
        if store is None:
            store = StateStore(program.compiled, program.reading, self.device, now)
            self._stores[program] = store
        else:
            store.take_over(now)
        return store

    def leave(self) -> None:
        """Forget the device, after ``save``."""
        self.device.clear()
        self.store = None
        self._stores.clear()

    def save(self, local_only: bool) -> None:
        """Copy values to the host that would be lost with the device."""
        self.bring_down(local_only)
        if not self._trains and self.device.due(Event.DETACH, self.device.copies):
            self._download(local_only, Event.DETACH)
        compares = self.has_agreed and not local_only
        self._left = self.attached.digests() if compares else None

    def check_processes(self) -> None:
        """Refuse weights that were written independently by the processes of a job."""
        assert self.written is not None
        agreement.check_written(self.written)
        self.written = None

    @locked
    def copy_to_host(self) -> None:
        self._programs.require_one()
        if self.store is not None:
            self.device.fetch()
        self._download()

    @locked
    def copy_to_device(self) -> None:
        """Copy weights and buffers to the device. Training progress on the device is discarded.

        While the model is detached nothing happens, because attaching copies the weights.
        """
        self._programs.require_one()
        if self.store is None:
            return
        self.periodic_checks.due = 0.0
        with interrupts.deferred(), self._copying():
            if self._taking_over:  # weights from a trainer are the same in all processes
                self.store.write_stale()
                return
            if self.store.upload():
                self.written = self.store.digests()
        self.adopted()

    def adopted(self) -> None:
        """Record that the device has the model's present host weights, including replaced
        tensors.
        """
        for variant in self._programs.all:
            variant.reading.adopt()
        self.periodic_checks.adopted()

    @locked
    def copy_buffers_to_device(self) -> None:
        names = self._programs.now.spec.updatable_buffers
        if not names:
            raise Error(
                "No named buffers marked as updatable",
                fix="call options.updatableNamedBuffers(['name']) before you wrap the model",
            )
        if self.store is not None:
            self.store.upload_buffers(names)

    def bring_host_up_to_date(self) -> bool:
        """Copy weights to the host if the device is newer. Return whether they were copied."""
        self.periodic_checks.due = 0.0
        # If the device is not newer, nothing waits for the lock. In particular, compilation does
        # not.
        if not self.device.newer:
            return False
        with self.lock():
            return self.bring_down()

    def bring_down(self, local_only: bool = False) -> bool:
        """Copy weights to the host. With ``local_only``, exchange nothing with other processes."""
        if not self.device.newer or self.store is None or self._is_copying:
            return False
        if local_only and self.store.layout.is_in_parts:
            self._download(local_only)
            return True
        log.python.debug("Implicit copyWeightsToHost()")
        owner = self._owner()
        if owner is not None:
            owner.copyWeightsToHost()
        else:
            self._download()
        return True

    def _download(self, local_only: bool = False, event: Event = Event.COPY_TO_HOST) -> None:
        if self.store is None:
            return
        with interrupts.deferred(), self._copying():
            self.store.download(event, local_only)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy weights between host and device. This does not count as an access by the user."""
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    @locked
    def fetch(self) -> None:
        """Get newer weights from another model that trains the same tensors."""
        self.device.fetch()
        if self.store is not None and self.device.stale:
            self.bring_down()  # another model may have written only some of them to the host
            log.python.debug("Implicit copyWeightsToDevice()")
            owner = self._owner()
            assert owner is not None
            self._taking_over = True
            try:
                owner.copyWeightsToDevice()
            finally:
                self._taking_over = False


def _bring_up_to_date(transfers: Transfers | None) -> None:
    if transfers is not None:
        transfers.bring_host_up_to_date()
