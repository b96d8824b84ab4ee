"""Chips held across the processes of a user, in one locked file per system.

An entry counts as long as its process lives, so whatever happens to a holder, its chips are free.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import filelock

from . import _systems
from ._base import archive, env, log
from ._base.errors import Error
from ._base.processes import ProcessIdentity
from ._systems import System

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
_LOCK_SECONDS = 30.0
_LARGEST = 1 << 24  # bytes of the file: some 50,000 holders


@dataclass(frozen=True)
class Holder:
    device: int  # its id
    chips: tuple[int, ...]
    process: ProcessIdentity
    since: float  # seconds since the epoch
    token: str  # tells this entry apart from all others


class Lease:
    """A device held until ``release``, the end of the process or of this object."""

    def __init__(
        self, device_id: int | None, chips: tuple[int, ...], give_back: Callable[[], None]
    ) -> None:
        self.device_id, self.chips = device_id, chips
        self._finish = weakref.finalize(self, give_back)

    def release(self) -> None:
        self._finish()

    def __str__(self) -> str:
        return "none" if self.device_id is None else f"Id {self.device_id}"


def acquire(count: int, ipu_id: int | None = None, wait: bool = False) -> Lease:
    """Hold the smallest device with ``count`` chips, or that of an id, if need be when free."""
    if count == 0:
        return Lease(None, (), lambda: None)
    system = _systems.current()
    wanted = _candidates(system, count, ipu_id)
    pause = _FIRST_WAIT
    while True:
        try:
            lease, busy = _try(system, wanted)
        except (_Unusable, OSError, filelock.Timeout) as trouble:
            _keep_to_itself(str(trouble))
            lease, busy = _try(system, wanted)
        if lease is not None:
            log.trace("Attached to device %s", lease)
            return lease
        if not wait:
            raise _all_busy(count, ipu_id, busy)
        log.trace("No IPU available, sleeping for %g seconds", pause)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


def holders(system: System | None = None) -> list[Holder]:
    try:
        entries = _read(_path(system or _systems.current()))
    except (_Unusable, OSError) as error:
        raise Error(
            "The file or directory in which devices are bookkept cannot be used",
            got=str(error),
            fix="delete it, or set POPTORCH_POD_DIR to another directory",
        ) from error
    return sorted(entries, key=lambda holder: holder.since)


def _candidates(system: System, count: int, ipu_id: int | None) -> list[int]:
    devices = system.devices
    if not devices:
        raise Error(
            f"Failed to acquire {count} IPU(s): No IPU detected in the system",
            got="POPTORCH_POD describes a machine without IPUs",
            fix=("gc-monitor lists the devices of the system", "unset POPTORCH_POD"),
        )
    if ipu_id is None:
        wanted = system.of_size(count)
        if not wanted:
            raise Error(
                f"Failed to acquire {count} IPU(s): No device found on the system with {count} "
                "IPUs",
                got=f"{system.chips} IPUs in {system.name}",
                fix=f"describe a larger system: POPTORCH_POD={count}",
            )
        return wanted
    if not 0 <= ipu_id < len(devices):
        raise Error(
            f"Failed to acquire device Id {ipu_id}",
            got=f"the ids of {system.name} are 0 to {len(devices) - 1}",
            fix="gc-info --list-devices lists them",
        )
    size = len(devices[ipu_id])
    if size < count:
        raise Error(
            f"Expected at least replication factor * used IPUs = {count} IPUs",
            got=f"device Id {ipu_id} has {size}",
            fix="gc-info --list-devices lists the devices and their sizes",
        )
    if size > count:
        log.engine.warning(
            "Device Id %d has %d IPUs and the model uses %d: %d are unused",
            ipu_id, size, count, size - count,
        )  # fmt: skip
    return [ipu_id]


def _all_busy(count: int, ipu_id: int | None, busy: Iterable[Holder]) -> Error:
    what = f"{count} IPU(s)" if ipu_id is None else f"device Id {ipu_id}"
    who = (
        f"device Id {holder.device} is held by process {holder.process.pid} "
        f"({holder.process.command}, {holder.process.user})"
        for holder in busy
    )
    return Error(
        f"Failed to acquire {what}",
        got="\n".join(who),
        fix=(
            "destroy() or detachFromDevice() the executors that hold them",
            "set POPTORCH_WAIT_FOR_IPU=1 to wait",
        ),
    )


def _try(system: System, wanted: Iterable[int]) -> tuple[Lease | None, list[Holder]]:
    """Write this process down for the first free device; else return who is in the way."""
    path = _path(system)
    with _lock(path):
        present = _read(path)
        busy = {chip for holder in present for chip in holder.chips}
        for device in wanted:
            chips = tuple(system.devices[device])
            if busy.isdisjoint(chips):
                process, token = ProcessIdentity.current(), secrets.token_hex(8)
                mine = Holder(device, chips, process, time.time(), token)
                _write(path, [*present, mine])
                give_back = functools.partial(_give_back, path, mine.token, os.getpid())
                return Lease(device, chips, give_back), []
    return None, present


_returned: set[str] = set()


def _give_back(path: Path, token: str, pid: int) -> None:
    """Strike an entry out. The garbage collector may do so while another one is being written."""
    if os.getpid() != pid:  # a forked copy of the lease holds nothing
        return
    _returned.add(token)
    try:
        with _lock(path):
            _write(path, _read(path))
    except (_Unusable, OSError, filelock.Timeout) as trouble:  # it ends with this process
        log.engine.debug("A device is not struck out of %s: %s", path, trouble)


class _Unusable(Exception):  # noqa: N818 (it never reaches users)
    """The file or directory in which devices are bookkept cannot be used."""


_own: list[tempfile.TemporaryDirectory[str]] = []


def _keep_to_itself(why: str) -> None:
    """Bookkeep in a folder of this process from now on: other processes do not see its devices."""
    log.engine.warning(
        "Devices are not bookkept across processes (POPTORCH_POD_DIR names the directory): %s", why
    )
    folder = tempfile.TemporaryDirectory(prefix="poptorch-pod-")
    atexit.register(folder.cleanup)
    _own.append(folder)


def _path(system: System) -> Path:
    """The file of a system, in the environment's directory or in one of the user's own."""
    chosen, user = env.get("POPTORCH_POD_DIR"), ProcessIdentity.current().user
    if hasattr(os, "getuid"):
        user = str(os.getuid())
    folder = Path(chosen or Path(tempfile.gettempdir()) / f"poptorch-pod-{user}")
    if _own:
        folder = Path(_own[-1].name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not chosen and hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise _Unusable(f"{folder} belongs to another user")
    return folder / f"{system.name}.json"


def _lock(path: Path) -> filelock.BaseFileLock:
    # A lock of the operating system, which ends with the process, however that ends. One object
    # for each path and thread: taking it again inside itself is allowed.
    return filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS, is_singleton=True)


def _read(path: Path) -> list[Holder]:
    try:
        entries = json.loads(archive.read_text(path, _LARGEST))
        present = [
            Holder(
                entry["device"], tuple(entry["chips"]), ProcessIdentity(**entry["process"]),
                entry["since"], entry["token"],
            )
            for entry in entries
        ]  # fmt: skip
    except FileNotFoundError:
        return []
    except archive.InvalidFile as error:  # a pipe, which would wait, for one
        raise _Unusable(str(error)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _Unusable(f"{path} was not written by this version") from error
    return [holder for holder in present if holder.process.lives]


def _write(path: Path, present: Iterable[Holder]) -> None:
    """Replace the file at once: readers do not lock."""
    temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(8)}")
    entries = [dataclasses.asdict(holder) for holder in present if holder.token not in _returned]
    try:
        # Not through a link that somebody has put there, in a folder that several users share.
        with temporary.open("x") as file:
            json.dump(entries, file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
