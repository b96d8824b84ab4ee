"""Messages between a loader and its loading process, over a socket."""

from __future__ import annotations

import enum
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

ALL_ROWS = -1
_HEADER = struct.Struct("<biqi")  # kind, slot, rows, bytes of text that follow
_CHUNK = 1 << 16
_MOST_TEXT = 48_000  # bytes that fit the socket's buffer: sending an error never waits for a reader


class Kind(enum.IntEnum):
    START = 0  # go on after the first element
    FREE = 1  # the oldest slot may be filled again
    RESTART = 2  # forget all elements and begin this iteration of the data set; rows: which one
    STOP = 3

    READY = 4  # carries the ring's file; rows: where in it the layout is
    FAILED = 5  # carries a traceback; slot: whether the data set had arrived; the worker ends
    ITEM = 6  # a slot is full; rows says how many are valid, or ALL_ROWS
    END = 7  # end of an iteration; rows is 1 when the worker goes on by itself, else 0
    ERROR = 8  # the data set raised: carries a traceback; the worker waits
    RESTARTED = 9  # what follows belongs to the new iteration


class Message(NamedTuple):
    kind: Kind
    slot: int
    rows: int
    text: str


class Channel:
    """One end of the connection; what was in memory before a message is seen after it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = b""
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let ``receive`` return None when this descriptor gets readable, too."""
        self._poll.register(descriptor, select.POLLIN)

    def send(
        self, kind: Kind, slot: int = 0, rows: int = 0, text: str = "", files: Sequence[int] = ()
    ) -> None:
        """Send a message, with the end of the text; ConnectionError: the other process is gone."""
        carried = text.encode(errors="backslashreplace")[-_MOST_TEXT:]
        content = _HEADER.pack(kind, slot, rows, len(carried)) + carried
        if files:
            socket.send_fds(self._socket, [content], files)
        else:
            self._socket.sendall(content)

    def receive(
        self, seconds: float | None = None, files: list[int] | None = None
    ) -> Message | None:
        """Return the next message; None when there is none within some seconds (None: for ever)."""
        while (message := self._next()) is None:
            content = self._arrived(files)
            if content is None:
                if seconds == 0.0 or not self._is_readable(seconds):
                    return None
                continue
            if not content:
                raise EOFError
            self._received += content
        return message

    def _arrived(self, files: list[int] | None) -> bytes | None:
        try:
            if files is None:
                return self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
            content, found, *_ = socket.recv_fds(self._socket, _CHUNK, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        files += found
        return content

    def _is_readable(self, seconds: float | None) -> bool:
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        return any(descriptor == self._socket.fileno() for descriptor, _ in ready)

    def _next(self) -> Message | None:
        if len(self._received) < _HEADER.size:
            return None
        kind, slot, rows, length = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        text = self._received[_HEADER.size : end].decode(errors="replace") if length else ""
        self._received = self._received[end:]
        return Message(Kind(kind), slot, rows, text)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
