"""Choose the folders of code that will be run, and check them: they must belong to the user, and
nobody else may write to them.

A folder is checked together with all directories and links that lead to it. If only the user and
root can change those, nobody else can replace the folder, neither before nor after it is used.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

from . import env, log, temporary_folders

# The user did not choose torch's own folder. The variable has this value as soon as torch's
# compiler is imported, even for a trace.
_TORCHS, _TORCHS_OWN = "of-torchs-compiler", "torchinductor_"
_ROOT = 0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # largest number of links on the way to a folder, as in Linux


def problem_with(folder: Path, on_the_way: bool = True) -> str | None:
    """Make a folder. Return why code in it cannot be trusted or written, or None.

    If each file has a digest with the user's key, it does not matter who can replace the folder.
    Then pass ``on_the_way=False``.
    """
    try:
        why = _who_can_change_the_path(folder) if on_the_way else None
        if why is not None:
            return why
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = _who_can_change_the_path(folder) if on_the_way else None
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if why is not None:
        return why
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & OTHERS_WRITE:
        return "other users can write to it (chmod go-w)"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def is_own(path: Path) -> bool:
    """Return whether a file or folder belongs to the user, is not a link, and cannot be written by
    anybody else.
    """
    status = path.lstat()
    return (
        not stat.S_ISLNK(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & OTHERS_WRITE
    )


def _who_can_change_the_path(folder: Path) -> str | None:
    """Return who else can change where a path leads; None if nobody can, as far as the
    path exists.
    """
    absolute = Path.cwd() / folder
    at, left, links = Path(absolute.anchor), list(absolute.parts[1:]), 0
    while left:
        if (why := _other_writer(at, at.lstat())) is not None:
            return why
        name = left.pop(0)
        at = at.parent if name == ".." else at / name
        try:
            status = at.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(status.st_mode):
            continue
        links += 1
        if status.st_uid not in (_ROOT, os.getuid()):
            return f"{at} is a link of another user"
        if links > _MOST_LINKS:
            return f"{at} is a link that leads nowhere"
        target = at.parent / os.readlink(at)
        at, left = Path(target.anchor), [*target.parts[1:], *left]
    return None


def _other_writer(directory: Path, status: os.stat_result) -> str | None:
    if status.st_uid not in (_ROOT, os.getuid()):
        return f"{directory} belongs to another user"
    # in a directory like /tmp, others cannot rename what does not belong to them
    if status.st_mode & stat.S_ISVTX:
        return None
    by_group = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if by_group or status.st_mode & stat.S_IWOTH:
        return f"other users can write to {directory} (chmod go-w)"
    return None


@functools.cache
def _is_private(group: int) -> bool:
    """Return whether only this user and root are members of a group, as in groups named
    after a user.
    """
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    named = entry.gr_name in ("root", user.pw_name) and group in (_ROOT, user.pw_gid)
    return named and {*entry.gr_mem} <= {"root", user.pw_name}


def temporary() -> str | None:
    try:
        return tempfile.gettempdir()
    except OSError:
        return None


def of_the_user() -> Path:
    """Return where code is stored if no option names a folder: next to torch's compiler cache."""
    folder, why = chosen()
    return folder if why is None else of_the_process(why)


def chosen() -> tuple[Path, str | None]:
    """Return that folder, and why nothing can be stored there."""
    given, place = env.get("TORCHINDUCTOR_CACHE_DIR"), temporary()
    own = Path(given or place or "")
    if own.name == _TORCHS:  # while torch's compiler runs
        return own.parent, None
    if not given and place is None:
        return own, "there is no writable temporary directory"
    if not given or (str(own.parent) == place and own.name.startswith(_TORCHS_OWN)):
        own = Path(place or "", f"poptorch-code-{os.getuid()}")
        if (why := problem_with(own)) is not None:  # others could replace the folder at any time
            return own, f"{own}: {why}"
    folder = own / "poptorch"
    why = problem_with(folder)
    return folder, None if why is None else f"{folder}: {why}"


def of_torchs_compiler() -> contextlib.AbstractContextManager[None]:
    """Make torch's compiler use a part of the user's folder within the block."""
    return env.put_within("TORCHINDUCTOR_CACHE_DIR", str(of_the_user() / _TORCHS))


@functools.cache
def of_the_process(why: str) -> Path:
    log.engine.warning("Compiled code is not stored for later processes: %s", why)
    try:
        return temporary_folders.folder("poptorch-code-")
    except OSError:  # for example a full disk; code that writes to the folder reports the error
        return Path(os.devnull) / "poptorch"
