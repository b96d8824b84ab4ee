"""Track whether the host or a device has the newest values of a tensor, and what each
event changes.
"""

from .access import NO_GRADIENTS, unwatched
from .cells import Cell, Copy, DeviceCopies
from .coherence_table import TABLE, Coherence, CopyDirection, Event, Transition
from .locks import Lock, locked

__all__ = [
    "NO_GRADIENTS",
    "TABLE",
    "Cell",
    "Coherence",
    "Copy",
    "CopyDirection",
    "DeviceCopies",
    "Event",
    "Lock",
    "Transition",
    "locked",
    "unwatched",
]
