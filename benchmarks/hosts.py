"""Create two virtual hosts (network namespaces), and a wire between them that can be slow or cut.

This needs root, ``ip`` and ``/dev/net/tun``. This process forwards the packets itself, because few
kernels have ``netem``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

INTERFACE = "poptorch0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNNEL, _FLAGS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN, and packets without a header


class UnavailableError(Exception):
    """Namespaces cannot be created on this machine."""


class Wire:
    """Carries packets between the hosts, ``delay`` seconds late, and drops a share ``loss`` of
    them.
    """

    def __init__(self, names: list[str]) -> None:
        self.delay, self.loss, self.cut = 0.0, 0.0, False
        self._draw, self._loop = random.Random(1), asyncio.new_event_loop()
        self.hosts = names
        self._ends = [_on(name, _tunnel) for name in names]
        for end, other in zip(self._ends, self._ends[::-1], strict=True):
            self._loop.add_reader(end, self._carry, end, other)
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def _carry(self, end: int, other: int) -> None:
        packet = os.read(end, 1 << 16)
        if not self.cut and self._draw.random() >= self.loss:
            self._loop.call_later(self.delay, os.write, other, packet)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for end in self._ends:
            os.close(end)


def _tunnel() -> int:
    try:
        handle = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(handle, _TUNNEL, struct.pack("16sH22x", INTERFACE.encode(), _FLAGS))
    except OSError as error:
        raise UnavailableError(str(error)) from error
    return handle


def _on(name: str, make: Callable[[], Any]) -> Any:
    """Call a function in a thread on a host, and return its result."""
    with ThreadPoolExecutor(1, initializer=enter, initargs=[name]) as pool:
        return pool.submit(make).result()


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        raise UnavailableError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[Wire]:
    """Provide hosts with ADDRESSES at INTERFACE within the block, or raise UnavailableError."""
    names = [f"poptorch-{os.getpid()}-{letter}" for letter in "ab"]
    with contextlib.ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        wire = Wire(names)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        wire.start()
        undo.callback(wire.end)
        yield wire


def enter(name: str) -> None:
    """Move this process, and those that it starts, to a host."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)
