"""Folders of code that will be run: the user's own, and nobody else writes to them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from . import env, log

# Torch's own folder is no choice of the user's: as soon as its compiler is imported, also by a mere
# trace, the variable has it.
_TORCHS, _TORCHS_OWN = "of-torchs-compiler", "torchinductor_"


def trouble(folder: Path) -> str | None:
    """Make a folder; return why code in it cannot be trusted, or cannot be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it (chmod go-w)"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def temporary() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:
        return None


def of_the_user() -> Path:
    """Return where code is kept if no option names a folder: beside torch's compiler cache."""
    given, place = env.get("TORCHINDUCTOR_CACHE_DIR"), temporary()
    own = Path(given or place or "")
    if own.name == _TORCHS:  # while torch's compiler runs
        return own.parent
    if not given and place is None:
        return of_the_process("there is no temporary directory that can be written to")
    if not given or (str(own.parent) == place and own.name.startswith(_TORCHS_OWN)):
        own = Path(place or "", f"poptorch-code-{os.getuid()}")
        if (why := trouble(own)) is not None:  # others could put another folder in it at any time
            return of_the_process(f"{own}: {why}")
    folder = own / "poptorch"
    why = trouble(folder)
    return folder if why is None else of_the_process(f"{folder}: {why}")


def of_torchs_compiler() -> contextlib.AbstractContextManager[None]:
    """Have what torch's compiler keeps in a part of the user's folder meanwhile."""
    return env.put_within("TORCHINDUCTOR_CACHE_DIR", str(of_the_user() / _TORCHS))


@functools.cache
def of_the_process(why: str) -> Path:
    log.engine.warning("Compiled code is not kept for later processes: %s", why)
    try:
        folder = tempfile.TemporaryDirectory(prefix="poptorch-code-")
    except OSError:  # a full disk, for one: whoever writes below this meets an error, and says so
        return Path(os.devnull) / "poptorch"
    atexit.register(folder.cleanup)
    return Path(folder.name)
