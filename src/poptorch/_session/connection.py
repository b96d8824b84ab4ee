"""The hold of a session on its chips: acquired from the system, given back."""

from __future__ import annotations

from .. import _pod, _systems
from .._base import env, log
from .._base.errors import AssertionFailure
from .._ir.spec import Spec
from ..enums import ConnectionType

TILES = {kind.generation: kind.tiles for kind in _systems.KINDS.values()}


class Connection:
    """At most one lease at a time."""

    def __init__(self) -> None:
        self._lease: _pod.Lease | None = None
        self.attached = False

    def attach(self, spec: Spec, count: int) -> None:
        """Acquire chips, unless they are held already.

        Args:
            spec: says which device, and whether a busy one is waited for.
            count: of all replicas together.

        Raises:
            Error: none are free, or there are none ("Failed to acquire").
        """
        if self.attached:
            return
        if spec.target.device == "model":
            tiles = spec.target.tiles or TILES[spec.target.generation or 2]
            log.engine.debug("Instantiated device, running on IPU model with %d tiles", tiles)
        else:
            wait = env.get("POPTORCH_WAIT_FOR_IPU")
            self._lease = _pod.acquire(count, spec.runtime.ipu_id, wait)
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


def refuse_offline(spec: Spec) -> None:
    """Refuse to run where no device is.

    Raises:
        AssertionFailure: the connection is ``ConnectionType.Never``.
    """
    if spec.runtime.connection == ConnectionType.Never:
        raise AssertionFailure(
            "Trying to run a model on an offline device",
            got="ConnectionType.Never",
            fix="save it with compileAndExport(path) and run poptorch.load(path) elsewhere, "
            "or use ConnectionType.Always",
        )
