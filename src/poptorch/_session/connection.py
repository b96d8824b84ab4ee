"""The hold of a session on its chips: acquired from the system, given back (spec/runtime.md 4)."""

from __future__ import annotations

from typing import Protocol

from .._base import env, log
from .._ir.spec import Spec
from . import local_pod


class Lease(Protocol):
    """Chips that nobody else can have until they are released."""

    def release(self) -> None:
        """Give them back."""
        ...


TILES = {1: 1216, 2: 1472, 21: 1472}
# The system that chips come from: acquire(count, ipu_id=None, wait=False) -> Lease.
acquire = local_pod.acquire


class Connection:
    """At most one lease at a time."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self.attached = False

    def attach(self, spec: Spec, chips: int) -> None:
        """Acquire chips for every replica, unless they are held already.

        Args:
            spec: says which device, and whether a busy one is waited for.
            chips: per replica.

        Raises:
            Error: none are free, or there are none ("Failed to acquire").
        """
        if self.attached:
            return
        if spec.target.device == "model":
            tiles = spec.target.tiles or TILES[spec.target.generation or 2]
            log.engine.debug("Instantiated device, running on IPU model with %d tiles", tiles)
        else:
            count = chips * spec.loops.replicas
            wait = env.get("POPTORCH_WAIT_FOR_IPU")
            self._lease = acquire(count, spec.runtime.ipu_id, wait)
            log.engine.debug("Acquired %d IPU(s): running on device %s", count, self._lease)
        self.attached = True

    def detach(self) -> None:
        """Give the chips back."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()
        if self.attached:
            self.attached = False
            log.engine.debug("Detached from device")
