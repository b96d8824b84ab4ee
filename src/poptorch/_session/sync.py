"""Who has the newer weights, host or device, and when they travel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

from .._base import interrupts, log
from .._base.errors import Error
from .._compile import agreement
from . import links
from .device import Device

Digests = Mapping[str, str]

_versions = itertools.count(1)  # of host values, over all sessions


class Transfers(Protocol):
    """The public methods through which implicit transfers go, so that users can replace them."""

    def copyWeightsToHost(self) -> None:  # noqa: N802
        """Device to host."""

    def copyWeightsToDevice(self) -> None:  # noqa: N802
        """Host to device."""


def not_compiled() -> Error:
    """What using a model says before its compilation and after ``destroy``."""
    return Error(
        "The model has not been compiled or has been destroyed",
        fix="call the model, or its compile() method, with example inputs first",
    )


class Sync:
    """The state machine of one session's weights.

    Args:
        hosts: identities of the host tensors.
        transfers: the executor, or None once it is gone.

    Attributes:
        device: the device's state while attached, else None.
        dirty: whether the device has newer weights than the host.
        version: of the host's values, of their last download.
        linked: whether this is a trainer of the host tensors.
        looked_at: whether somebody may have had the model's tensors in hand since this was unset.
    """

    def __init__(self, hosts: tuple[int, ...], transfers: Callable[[], Transfers | None]) -> None:
        self.hosts = hosts
        self.device: Device | None = None
        self.dirty = False
        self.version = 0
        self.linked = False
        self.looked_at = False
        self._written: Digests | None = None  # to the device, since processes compared theirs
        self._fetching = False
        self._left: Digests | None = None  # on the host, when the device was given back
        self._transfers = transfers
        self._seen = 0
        self._last = 0
        self._trainers: list[links.Trainer] = []
        self._generation = -1
        links.follow(self)

    def get_device(self) -> Device:
        """Return the device, where there must be one."""
        assert self.device is not None
        return self.device

    def begin(self) -> None:
        """A program is compiled, and has no device yet."""
        self.dirty, self._written, self._left = False, None, None

    def take(self, device: Device) -> None:
        """There is a device, with what the host has."""
        self.device = device
        if self._left is not None and self._left != (now := device.digests()):
            self._written = now
        self._left = None

    def give_back(self, agreed: bool) -> None:
        """The device is no more; the host is up to date.

        Args:
            agreed: the processes of a job had the same weights.
        """
        self._left = self.get_device().digests() if agreed else None
        self.device = None

    def compare_written(self) -> None:
        """Compare weights that were written after the start with those of the job's processes.

        Raises:
            Error: they are others, or the other processes have written none.
        """
        if self._written is not None:
            agreement.check_written(self._written)
            self._written = None

    def bring_host_up_to_date(self, alone: bool = False) -> bool:
        """Download if the device is newer; return whether it was.

        Args:
            alone: nothing is exchanged: what other processes have of the model is not read.
        """
        self.looked_at = True
        if not self.dirty or self.device is None:
            return False
        if alone and self.device.is_in_parts:
            self.download(alone)
            return True
        log.python.debug("Implicit copyWeightsToHost()")
        owner = self._transfers()
        if owner is not None:
            owner.copyWeightsToHost()
        else:
            self.download()
        return True

    def download(self, alone: bool = False) -> None:
        """Device to host, unconditionally; nothing to do while detached."""
        if self.device is None:
            return
        with interrupts.deferred():
            self.dirty = False  # first: the copy itself looks at the module
            self.version = next(_versions)
            self.device.download(alone)

    def upload(self) -> None:
        """Host to device; training progress that was not downloaded is discarded.

        While detached nothing happens: attaching uploads.
        """
        if self.device is None:
            return
        with interrupts.deferred():
            self.dirty = False  # first, too
            if self._fetching:  # what a trainer has is alike in all processes
                self.device.write_all()
            elif self.device.upload():
                self._written = self.device.digests()

    # Sharing tensors with a trainer.

    def fetch(self) -> None:
        """Fetch newer weights that another trainer of the same tensors holds."""
        if self._generation != links.generation():
            self._generation = links.generation()
            trainers = links.trainers_of(self.hosts)
            self._trainers = [trainer for trainer in trainers if trainer is not self]
        newest = self._last
        for trainer in self._trainers:
            trainer.bring_host_up_to_date()
            newest = max(newest, trainer.version)
        if newest > self._seen:
            self._seen = newest
            if self.device is not None:
                self.bring_host_up_to_date()  # what another brought to the host is not all of it
                log.python.debug("Implicit copyWeightsToDevice()")
                owner = self._transfers()
                assert owner is not None
                self._fetching = True
                try:
                    owner.copyWeightsToDevice()
                finally:
                    self._fetching = False

    def last_version(self, version: int) -> None:
        """A trainer of the same tensors is gone; the host holds this version of its weights."""
        self._last = max(self._last, version)

    def link(self) -> None:
        """Be a trainer of the module's tensors, for other sessions to find."""
        links.register(self, self.hosts)
        self.linked = True

    def unlink(self) -> None:
        """Stop being a trainer of the module's tensors."""
        links.forget(self, self.hosts)
        self.linked = False
