"""What the consumer and the loading process say to one another.

Both talk over one socket: small messages in order, which also makes the buffers' contents visible
before the message that announces them. The consumer starts; then the worker announces itself with
one pickled :class:`Ready` or :class:`Failed`, and from there on the messages are ``(kind, slot,
rows)``, a :class:`Failed` following ``ERROR``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection

from .element import Form, TensorSpec

ALL_ROWS = -1
_FORMAT = struct.Struct("<biq")
# Errors must fit the socket's buffer, so that sending one never waits for a reader.
MAX_TEXT = 16_000


class Kind(enum.IntEnum):
    """The kinds of messages, the consumer's first."""

    START = 0  # go on after the first element
    FREE = 1  # the oldest slot may be filled again
    RESTART = 2  # forget all elements and begin a new iteration of the data set
    STOP = 3

    ITEM = 4  # a slot is full; rows says how many are valid, or ALL_ROWS
    END = 5  # end of an iteration; rows is 1 when the worker goes on by itself, else 0
    RESTARTED = 6  # what follows belongs to the new iteration
    ERROR = 7  # the data set raised


@dataclass(frozen=True)
class Ready:
    """The first element is there: how the ring is laid out."""

    form: Form
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Failed:
    """What the data set raised, as text: exceptions need not be picklable."""

    text: str

    @property
    def summary(self) -> str:
        """The last line of the traceback: type and message."""
        return self.text.strip().splitlines()[-1]


def send(connection: Connection, kind: Kind, slot: int = 0, rows: int = 0) -> None:
    """Send one message."""
    connection.send_bytes(_FORMAT.pack(kind, slot, rows))


def receive(connection: Connection) -> tuple[Kind, int, int]:
    """Wait for one message.

    Raises:
        EOFError, ConnectionError: the other process is gone.
    """
    kind, slot, rows = _FORMAT.unpack(connection.recv_bytes())
    return Kind(kind), slot, rows
