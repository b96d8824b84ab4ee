"""Whose values are newest, the host's or a device's, and what each event does about it."""

from .access import unwatched
from .cells import Cell, Copy, Device
from .table import TABLE, Event, Row, State, Transfer

__all__ = ["TABLE", "Cell", "Copy", "Device", "Event", "Row", "State", "Transfer", "unwatched"]
