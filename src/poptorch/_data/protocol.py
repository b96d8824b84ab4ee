"""What the consumer and the loading process say to one another, and the channel they use.

Both talk over one socket: small messages in order, which also makes the buffers' contents visible
before the message that announces them. The worker begins with ``READY`` or ``FAILED``.
"""

from __future__ import annotations

import enum
import pickle
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

from .element import Form, TensorSpec

ALL_ROWS = -1
# Errors must fit the socket's buffer, so that sending one never waits for a reader.
MAX_TEXT = 16_000
_HEADER = struct.Struct("<biqq")  # kind, slot, rows, bytes that follow
_CHUNK = 1 << 16


class Kind(enum.IntEnum):
    """The kinds of messages, the consumer's first."""

    START = 0  # go on after the first element
    FREE = 1  # the oldest slot may be filled again
    RESTART = 2  # forget all elements and begin this iteration of the data set; rows: which one
    STOP = 3

    READY = 4  # carries a Ready
    FAILED = 5  # carries a Failed; the worker ends
    ITEM = 6  # a slot is full; rows says how many are valid, or ALL_ROWS
    END = 7  # end of an iteration; rows is 1 when the worker goes on by itself, else 0
    ERROR = 8  # the data set raised: carries a Failed; the worker waits
    RESTARTED = 9  # what follows belongs to the new iteration


@dataclass(frozen=True)
class Ready:
    """The first element is there: how the ring is laid out."""

    form: Form
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Failed:
    """What was raised, as text: exceptions need not be picklable.

    Attributes:
        text: the traceback.
        has_arrived: whether the data set had reached the worker by then.
    """

    text: str
    has_arrived: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    """One message; see ``Kind`` for what the numbers mean."""

    kind: Kind
    slot: int
    rows: int
    content: bytes

    def load(self) -> Any:
        """Unpickle what the message carries."""
        return pickle.loads(self.content)


class Channel:
    """One end of the socket between the two processes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = b""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let ``has_message`` return, False then, when this descriptor gets readable, too."""
        self._poll.register(descriptor, select.POLLIN)

    def send(self, kind: Kind, slot: int = 0, rows: int = 0, content: Any = None) -> None:
        """Send one message, with a picklable content or none.

        Raises:
            ConnectionError: the other process is gone.
        """
        carried = b"" if content is None else pickle.dumps(content)
        self._socket.sendall(_HEADER.pack(kind, slot, rows, len(carried)) + carried)

    def has_message(self, seconds: float | None = 0.0) -> bool:
        """Wait, for ever if None, until ``receive`` has something: a message, or the end."""
        if self._received or self._arrived():
            return True
        if seconds == 0.0:
            return False
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        return any(descriptor == self._socket.fileno() for descriptor, _ in ready)

    def _arrived(self) -> bool:
        """Take what is there already: one call of the system where asking first makes it two."""
        try:
            self._received = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True  # nothing received means the end, which receive() finds again

    def receive(self) -> Message:
        """Wait for one message.

        Raises:
            EOFError, ConnectionError: the other process is gone.
        """
        while len(self._received) < _HEADER.size:
            self._read()
        kind, slot, rows, length = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        while len(self._received) < end:
            self._read()
        content, self._received = self._received[_HEADER.size : end], self._received[end:]
        return Message(Kind(kind), slot, rows, content)

    def _read(self) -> None:
        # Several messages at a time, when the other process is ahead.
        received = self._socket.recv(_CHUNK)
        if not received:
            raise EOFError
        self._received += received

    def close(self) -> None:
        """Close this process's end."""
        self._socket.close()
