"""Reserve chips of the virtual pod for a model, and release them."""

from __future__ import annotations

from .. import _ipu_systems, _pod
from .._base import env, log
from .._ir.spec import Spec

_TILES = {kind.generation: kind.tiles for kind in _ipu_systems.KINDS.values()}


class Chips:
    """The chips that one model holds while it is attached."""

    def __init__(self) -> None:
        self._lease: _pod.Lease | None = None

    def acquire(self, spec: Spec, count: int) -> None:
        """Reserve chips for all replicas together, unless the model already holds them."""
        if self._lease is not None:
            return
        if spec.target.device == "model":
            tiles = spec.target.tiles or _TILES[spec.target.generation or 2]
            self._lease = _pod.acquire(0)
            log.engine.debug("Instantiated device, running on IPU model with %d tiles", tiles)
        else:
            wait = env.get("POPTORCH_WAIT_FOR_IPU")
            self._lease = _pod.acquire(count, spec.runtime.ipu_id, wait)
            log.engine.debug("Acquired %d IPU(s): running on device %s", count, self._lease)

    def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()
            log.engine.debug("Detached from device")
