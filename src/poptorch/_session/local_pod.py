"""A pod of chips that knows only this process: who holds which device id.

Ids are those of the machine's list: single chips first, then aligned groups of 2, 4, 8, ...
"""

from __future__ import annotations

import threading

from .._base.errors import Error

CHIPS = 64
_busy: set[int] = set()
_changed = threading.Condition()


def _groups() -> list[range]:
    sizes = [2**power for power in range(CHIPS.bit_length())]
    return [range(at, at + size) for size in sizes for at in range(0, CHIPS, size)]


class Lease:
    """A device id and its chips, held until ``release``."""

    def __init__(self, device_id: int, chips: range) -> None:
        self.device_id = device_id
        self._chips: range | None = chips

    def release(self) -> None:
        """Give the chips back; a second call does nothing."""
        with _changed:
            if self._chips is not None:
                _busy.difference_update(self._chips)
                self._chips = None
                _changed.notify_all()

    def __str__(self) -> str:
        return f"Id {self.device_id}"


def acquire(count: int, ipu_id: int | None = None, wait: bool = False) -> Lease:
    """Hold the smallest free device of at least ``count`` chips, or the device of an id.

    Raises:
        Error: it is busy and ``wait`` is off, or there is no such device.
    """
    groups = _groups()
    if ipu_id is not None:
        if not 0 <= ipu_id < len(groups):
            raise Error(f"Failed to acquire device Id {ipu_id}", got="no device has that id")
        if len(groups[ipu_id]) < count:
            raise Error(
                "Expected at least replication factor * used IPUs",
                got=f"device Id {ipu_id} has {len(groups[ipu_id])} IPUs; the model needs {count}",
            )
        wanted = [ipu_id]
    else:
        wanted = [i for i, chips in enumerate(groups) if len(chips) >= count]
    if not wanted:
        raise Error(
            f"Failed to acquire {count} IPU(s)",
            got=f"No device found on the system with {count} IPUs",
        )
    with _changed:
        while True:
            for device_id in wanted:
                if _busy.isdisjoint(groups[device_id]):
                    _busy.update(groups[device_id])
                    return Lease(device_id, groups[device_id])
            if not wait:
                what = f"{count} IPU(s)" if ipu_id is None else f"device Id {ipu_id}"
                raise Error(
                    f"Failed to acquire {what}",
                    got="all that would do are held by other models",
                    fix="destroy() or detachFromDevice() another model, or set "
                    "POPTORCH_WAIT_FOR_IPU=1 to wait",
                )
            _changed.wait()
