"""Track whether the host or a device has the newest values of a tensor, and what each
event changes.
"""

from .access import NO_GRADIENTS, unwatched
from .cells import Cell, Copy, Device
from .locks import Lock, locked
from .table import TABLE, Event, Row, State, Transfer

__all__ = [
    "NO_GRADIENTS", "TABLE", "Cell", "Copy", "Device", "Event", "Lock", "Row", "State",
    "Transfer", "locked", "unwatched",
]  # fmt: skip
