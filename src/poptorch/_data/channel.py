"""Messages between a loader and its loading process, over a socket that keeps them apart."""

from __future__ import annotations

import enum
import select
import socket
import struct
from multiprocessing import reduction
from typing import NamedTuple

ALL_ROWS = -1
_HEADER = struct.Struct("<biq")  # kind, slot, rows; the text follows
_LARGEST = 1 << 16
_MOST_TEXT = 48_000  # bytes that fit the socket's buffer: sending an error never waits for a reader


class Kind(enum.IntEnum):
    START = 0  # go on after the first element
    FREE = 1  # the oldest slot may be filled again
    RESTART = 2  # forget all elements and begin this iteration of the data set; rows: which one
    STOP = 3

    READY = 4  # the ring's file follows; rows: where in it the layout is
    FAILED = 5  # carries a traceback; slot: whether the data set had arrived; the worker ends
    ITEM = 6  # a slot is full; rows says how many are valid, or ALL_ROWS
    END = 7  # end of an iteration; rows is 1 when the worker goes on by itself, else 0
    ERROR = 8  # the data set raised: carries a traceback; the worker waits
    RESTARTED = 9  # what follows belongs to the new iteration; rows: which one
    GONE = 10  # is not sent: the worker has ended; the text says how


class Message(NamedTuple):
    kind: Kind
    slot: int
    rows: int
    text: str


class Channel:
    """One end of the connection; what was in memory before a message is seen after it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let ``receive`` return None when this descriptor gets readable, too."""
        self._poll.register(descriptor, select.POLLIN)

    def send(self, kind: Kind, slot: int = 0, rows: int = 0, text: str = "") -> None:
        """Send a message, with the end of the text; ConnectionError: the other process is gone."""
        carried = text.encode(errors="backslashreplace")[-_MOST_TEXT:]
        self._socket.sendall(_HEADER.pack(kind, slot, rows) + carried)

    def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message; None when there is none within some seconds (None: for ever)."""
        while (content := self._take()) is None:
            if seconds == 0.0 or not self._is_readable(seconds):
                return None
        if not content:
            raise EOFError
        kind, slot, rows = _HEADER.unpack_from(content)
        return Message(Kind(kind), slot, rows, content[_HEADER.size :].decode(errors="replace"))

    def _take(self) -> bytes | None:
        try:  # to ask first whether something is there would make it two calls of the system
            return self._socket.recv(_LARGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it has left messages unread; what it sent is still there
            return self._take()

    def _is_readable(self, seconds: float | None) -> bool:
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        return any(descriptor == self._socket.fileno() for descriptor, _ in ready)

    def send_file(self, descriptor: int) -> None:
        reduction.sendfds(self._socket, [descriptor])

    def receive_file(self) -> int:
        (descriptor,) = reduction.recvfds(self._socket, 1)
        return descriptor

    def close(self) -> None:
        self._socket.close()
