"""Exchange messages between a loader and its loading process, over a socket that preserves message
boundaries.
"""

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
# bytes that fit the socket's buffer, so that sending an error never waits for a reader
_MOST_TEXT = 48_000


class MessageKind(enum.IntEnum):
    START = 0  # continue after the first element
    FREE = 1  # the oldest slot may be filled again
    RESTART = 2  # drop all elements and start this iteration of the data set; rows: its number
    STOP = 3

    READY = 4  # the file of the ring follows; rows: the offset of the layout in it
    FAILED = 5  # contains a traceback; slot: whether the data set had arrived; the producer ends
    ITEM = 6  # a slot is full; rows is the number of valid rows, or ALL_ROWS
    END = 7  # end of an iteration; rows is 1 if the producer continues by itself, else 0
    ERROR = 8  # the data set raised an error; contains a traceback; the producer waits
    RESTARTED = 9  # what follows belongs to the new iteration; rows: its number
    GONE = 10  # never sent: the producer has ended; the text says how


class Message(NamedTuple):
    kind: MessageKind
    slot: int
    rows: int
    text: str


class Connection:
    """One end of the connection. What was written to memory before a message is visible
    after it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Make ``receive`` return None also when this descriptor becomes readable."""
        self._poll.register(descriptor, select.POLLIN)

    def send(self, kind: MessageKind, slot: int = 0, rows: int = 0, text: str = "") -> None:
        """Send a message with the end of the text. Raise ConnectionError if the other
        process is gone.
        """
        carried = text.encode(errors="backslashreplace")[-_MOST_TEXT:]
        self._socket.sendall(_HEADER.pack(kind, slot, rows) + carried)

    def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message; None if none arrives within some seconds (None: wait
        forever).
        """
        while (content := self._receive_now()) is None:
            if seconds == 0.0 or not self._is_readable(seconds):
                return None
        if not content:
            raise EOFError
        kind, slot, rows = _HEADER.unpack_from(content)
        return Message(
            MessageKind(kind), slot, rows, content[_HEADER.size :].decode(errors="replace")
        )

    def _receive_now(self) -> bytes | None:
        try:  # checking for a message first would need a second system call
            return self._socket.recv(_LARGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        # it has left messages unread, but the messages that it sent are still here
        except ConnectionResetError:
            return self._receive_now()

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
