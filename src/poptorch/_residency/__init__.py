"""Whose values are newest, the host's or a device's, and what each event does about it."""

from .access import NO_GRADIENTS, unwatched
from .cells import Cell, Copy, Device
from .locks import Lock, locked
from .table import TABLE, Event, Row, State, Transfer

__all__ = [
    "NO_GRADIENTS", "TABLE", "Cell", "Copy", "Device", "Event", "Lock", "Row", "State",
    "Transfer", "locked", "unwatched",
]  # fmt: skip
