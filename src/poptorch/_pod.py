"""Reserve chips of the virtual pod, across all processes of one user.

Each reservation is a file that names its process. It is valid as long as that process lives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from . import _ipu_systems
from ._base import archive, env, folders, log, temporary_folders
from ._base.errors import Error
from ._base.processes import ProcessIdentity
from ._ipu_systems import System

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
_LOCK_SECONDS = 30.0
_LARGEST = 1 << 20  # bytes in a file
_MOST = 1 << 31  # upper limit of process and device numbers


@dataclass(frozen=True)
class Holder:
    device: int  # device id
    chips: tuple[int, ...]
    process: ProcessIdentity
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        command, user = self.process.command, self.process.user
        return f"device Id {self.device} is held by process {self.process.pid} ({command}, {user})"


class Lease:
    """A reserved device. It is free again after ``release``, when this object is deleted or when
    the process ends.
    """

    def __init__(
        self, device_id: int | None, chips: tuple[int, ...], release: Callable[[], None]
    ) -> None:
        self.device_id, self.chips = device_id, chips
        self._finish = weakref.finalize(self, release)

    def release(self) -> None:
        self._finish()

    def __str__(self) -> str:
        return "none" if self.device_id is None else f"Id {self.device_id}"


def acquire(count: int, ipu_id: int | None = None, wait: bool = False) -> Lease:
    """Reserve the smallest free device with ``count`` chips, or the device with the given id; wait
    for it if asked to.

    The chips are not real hardware. Another process therefore blocks you only if you ask for a
    specific device, wait for one, or set the folder in which processes share devices.
    """
    if count == 0:
        return Lease(None, (), lambda: None)
    system = _ipu_systems.current()
    candidates = _candidates(system, count, ipu_id)
    pause = _FIRST_WAIT
    while True:
        try:
            lease, busy = _try(system, candidates)
        except OSError as trouble:
            _keep_to_itself(str(trouble))
            lease, busy = _try(system, candidates)
        if lease is not None:
            log.trace("Attached to device %s", lease)
            return lease
        if not wait:
            if ipu_id is None and not env.get("POPTORCH_POD_DIR"):
                lease, _ = _try(system, candidates, shares_pod=True)
            if lease is None:
                raise _all_busy(count, ipu_id, busy)
            log.engine.warning(
                (
                    "Other processes hold all IPUs of the virtual pod, so this process uses "
                    "additional ones: %s. To wait for the other processes, set "
                    "POPTORCH_WAIT_FOR_IPU=1. To share a pod with a limited number of IPUs, set "
                    "POPTORCH_POD_DIR"
                ),
                "; ".join(map(str, busy)),
            )
            return lease
        log.trace("No IPU available, sleeping for %g seconds", pause)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


def holders(system: System | None = None) -> list[Holder]:
    try:
        present = _present(*_place(system or _ipu_systems.current()))
    except OSError as error:
        raise Error(
            "The file or folder that records which process holds which device cannot be used",
            got=str(error),
            fix="delete it, or set POPTORCH_POD_DIR to another folder",
        ) from error
    return sorted(present, key=lambda holder: holder.since)


def _candidates(system: System, count: int, ipu_id: int | None) -> list[int]:
    devices = system.devices
    if not devices:
        raise Error(
            f"Failed to acquire {count} IPU(s): No IPU detected in the system",
            got="POPTORCH_POD describes a machine without IPUs",
            fix=(
                "list the devices of the system: gc-monitor",
                "or unset POPTORCH_POD, for the default system",
            ),
        )
    if ipu_id is None:
        candidates = system.of_size(count)
        if not candidates:
            raise Error(
                f"Failed to acquire {count} IPU(s): No device found on the system with {count} "
                "IPUs",
                got=f"{system.chips} IPUs in {system.name}",
                fix=f"choose a larger system: POPTORCH_POD={count}",
            )
        return candidates
    if not 0 <= ipu_id < len(devices):
        raise Error(
            f"Failed to acquire device Id {ipu_id}",
            got=f"the ids of {system.name} are 0 to {len(devices) - 1}",
            fix="pass one of these ids to options.useIpuId; to see them: gc-info --list-devices",
        )
    size = len(devices[ipu_id])
    if size < count:
        raise Error(
            f"Expected at least replication factor * used IPUs = {count} IPUs",
            got=f"device Id {ipu_id} has {size}",
            fix=(
                f"pass the id of a device with at least {count} IPUs to options.useIpuId; to list "
                "the devices with their sizes: gc-info --list-devices"
            ),
        )
    if size > count:
        log.engine.warning(
            f"Device Id {ipu_id} has {size} IPUs and the model uses {count}: {size - count} are "
            "unused"
        )
    return [ipu_id]


def _all_busy(count: int, ipu_id: int | None, busy: Iterable[Holder]) -> Error:
    what = f"{count} IPU(s)" if ipu_id is None else f"device Id {ipu_id}"
    return Error(
        f"Failed to acquire {what}",
        got="\n".join(map(str, busy)),
        fix=(
            "call destroy() or detachFromDevice() on the wrapped models that hold the devices",
            "or set POPTORCH_WAIT_FOR_IPU=1 to wait for them",
        ),
    )


def _try(
    system: System, candidates: Iterable[int], shares_pod: bool = False
) -> tuple[Lease | None, list[Holder]]:
    folder, name = _place(system)
    own = ProcessIdentity.current()
    with filelock.FileLock(folder / f"{name}.lock", timeout=_LOCK_SECONDS):
        present = _present(folder, name)
        counted = [each for each in present if not shares_pod or each.process == own]
        busy = {chip for holder in counted for chip in holder.chips}
        for device in candidates:
            chips = tuple(system.devices[device])
            if busy.isdisjoint(chips):
                holder = Holder(device, chips, own, time.time())
                file = _written(holder, folder / f"{name}.{secrets.token_hex(8)}.json")
                return Lease(device, chips, functools.partial(_release, file, os.getpid())), []
    return None, present


def _release(file: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked copy of the lease owns nothing
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as trouble:  # the reservation ends with this process anyway
        log.engine.debug("A device could not be released: %s", trouble)


_own: list[Path] = []


def _keep_to_itself(why: str) -> None:
    """Keep reservations in a private folder from now on, so that other processes do not
    see them.
    """
    log.engine.warning(
        (
            "Devices are not shared between processes, because the folder cannot be used "
            "(POPTORCH_POD_DIR selects another folder): %s"
        ),
        why,
    )
    _own.append(temporary_folders.folder("poptorch-pod-"))


def _place(system: System) -> tuple[Path, str]:
    chosen = env.get("POPTORCH_POD_DIR")
    folder = Path(chosen or Path(tempfile.gettempdir()) / f"poptorch-pod-{os.getuid()}")
    if _own:
        folder = _own[-1]
    if not chosen and (why := folders.problem_with(folder)) is not None:
        raise OSError(f"{folder}: {why}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder, system.name


def _present(folder: Path, name: str) -> list[Holder]:
    present = []
    for file in folder.glob(f"{name}.*.json"):
        try:
            holder = _holder(archive.from_json(archive.read_text(file, _LARGEST).encode()))
        except FileNotFoundError:  # its owner has just released it
            continue
        except archive.InvalidFile as error:  # for example, a pipe, which would block the reader
            raise OSError(str(error)) from error
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise OSError(f"{file} was not written by this version") from error
        if holder.process.lives:
            present.append(holder)
        else:
            file.unlink(missing_ok=True)
    return present


def _holder(entry: Mapping[str, Any]) -> Holder:
    """Return the contents of a reservation file. Anybody may have written it, if users share the
    folder.
    """
    own = entry["process"]
    numbers = (entry["device"], *entry["chips"], own["pid"])
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise ValueError(f"a number of a device or process is not valid: {numbers}")
    if not own["pid"] or not all(isinstance(own[name], str) for name in ("command", "user")):
        raise ValueError(f"the entry does not describe a process: {own}")
    started = None if own["started"] is None else float(own["started"])
    since = float(entry["since"])
    if not math.isfinite(since):
        raise ValueError(f"the time of the reservation is not valid: {since}")
    process = ProcessIdentity(own["pid"], started, own["command"], own["user"])
    return Holder(entry["device"], tuple(entry["chips"]), process, since)


def _written(holder: Holder, file: Path) -> Path:
    """Write a file that is complete as soon as it is visible, because readers do not lock it."""
    unfinished = file.with_suffix(".unfinished")
    # Do not follow a link that another user may have placed in a shared folder.
    with unfinished.open("x") as opened:
        json.dump(dataclasses.asdict(holder), opened)
    return unfinished.rename(file)
