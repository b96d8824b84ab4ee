"""Two network namespaces joined by a virtual link: two hosts as far as connections go."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

INTERFACE = "poptorch0"
HOSTS = {"poptorch-a": "10.213.7.1", "poptorch-b": "10.213.7.2"}
_NETWORK = 0x40000000  # CLONE_NEWNET


class UnavailableError(Exception):
    """Namespaces cannot be made here."""


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        raise UnavailableError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Within the block there are HOSTS, each with its address at INTERFACE.

    Raises:
        UnavailableError: they cannot be made, or others use their names.
    """
    made = []
    try:
        for name in HOSTS:
            _ip("netns", "add", name)
            made.append(name)
        first, second = HOSTS
        _ip("-n", first, "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", second)  # fmt: skip
        for name, address in HOSTS.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in made:
            _ip("netns", "del", name)


def enter(name: str) -> None:
    """Put this process, and those it starts, on a host."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)
