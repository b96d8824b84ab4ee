"""Sign code that will be run with a key of this user, so that code from others is not used."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import env, log
from .folders import of_the_user

_BYTES = 32
_NAME = "the name of the key"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def digest(name: str, data: bytes) -> bytes | None:
    key = _key(env.get("POPTORCH_KEY_FILE"))
    if key is None:
        return None
    return hmac.digest(key, len(name).to_bytes(8, "little") + name.encode() + data, hashlib.sha256)


def is_own(name: str, data: bytes, given: bytes) -> bool:
    own = digest(name, data)
    return own is not None and hmac.compare_digest(own, given)


def name() -> str:
    """Return a name for the key, which does not reveal it; empty if there is no key.

    Files with digests of other keys have other names, so nobody overwrites another user's file.
    """
    named = digest(_NAME, b"")
    return "" if named is None else named.hex()[:8]


@functools.cache
def _key(chosen: str) -> bytes | None:
    """Return the user's key. If the home directory cannot be used, it is stored next to
    the code.
    """
    why: object = None
    for path in (Path(chosen),) if chosen else _usual():
        try:
            return _read(path) or _made(path)
        except (OSError, ValueError) as error:
            why = error
    log.engine.warning(
        ("Compiled code is not stored, because there is no key to sign it with: %s"), why
    )
    return None


def _usual() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # there is no home directory
        yield Path.home() / ".local" / "state" / "poptorch" / "key"
    yield of_the_user() / "key"


def _read(path: Path) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _BYTES:
            raise ValueError(f"{path} is not a key")
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
            raise ValueError(f"{path} is accessible to other users (chmod 600)")
        return file.read()


def _made(path: Path) -> bytes | None:
    """Make a key, unless another process has just made one. The file is complete when it
    appears.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".key-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return _read(path)
