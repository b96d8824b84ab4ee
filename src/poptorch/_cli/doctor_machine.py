"""Implement ``poptorch doctor`` without a script: check whether the machine can compile
programs.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .._base import env, folders, private, resources, signed_code, temporary_folders
from .._compile.cache import CODE_SUFFIX
from .._cpu import toolchain
from .commands import FOUND

GIB, MIB = 1 << 30, 1 << 20
LEAST_DISK, LEAST_MEMORY = 1 * GIB, 1 * GIB  # with less than this, a compilation may fail
WATCHED = 0.5  # how many seconds to count idle cores
_PATIENCE = 60.0  # how many seconds to wait for the C++ compiler
_SOURCE = "#include <cmath>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check. ``fix`` says what to do if there is a problem."""

    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        wrong = "WRONG: " if self.fix else ""
        line = f"{self.subject:<10} {wrong}{self.text}"
        return f"{line}\n{'':<10} Fix: {self.fix}" if self.fix else line


def run(_: argparse.Namespace) -> int:
    wrong = 0
    for check in (_torch, _compiler, _caches, _threads, _memory, _environment):
        for finding in check():
            print(finding, flush=True)
            wrong += bool(finding.fix)
    things = {0: "Nothing is", 1: "One thing is"}.get(wrong, f"{wrong} things are")
    print(f"\n{things} wrong. To examine a script: poptorch doctor train.py")
    return FOUND if wrong else 0


def _torch() -> Iterator[Diagnosis]:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    lost = []
    for name in private.ROWS:
        try:
            getattr(private, name)
        except private.MissingName:
            lost.append(private.ROWS[name][1])
    if lost:
        fix = "install a version of torch that this version of poptorch supports"
        text = f"{versions}; names that poptorch uses are missing, so {lost[0]}"
        yield Diagnosis("torch", text, fix)
    else:
        yield Diagnosis("torch", versions)


def _compiler() -> Iterator[Diagnosis]:
    why = toolchain.obstacle()
    if why is not None:
        fix = "install g++, or set CXX; until then the interpreter runs everything"
        yield Diagnosis("compiler", why, fix)
        return
    compiler = env.get("CXX") or "g++"
    start = time.perf_counter()
    with temporary_folders.folder_within_block("poptorch-doctor-") as folder:
        (folder / "code.cpp").write_text(_SOURCE)
        command = [compiler, "-fopenmp", "-shared", "-fPIC", "code.cpp", "-o", "code.so"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE
            )
            complaint = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            complaint = str(error)
    if complaint:
        first = next((t for t in complaint.splitlines() if "error" in t), complaint)
        fix = f"install headers and OpenMP for it, and try: {shlex.join(command)}"
        yield Diagnosis("compiler", f"{compiler} fails: {first}", fix)
    else:
        seconds = time.perf_counter() - start
        place = shutil.which(compiler)
        yield Diagnosis("compiler", f"{place} compiles with OpenMP, in {seconds:.1f} s")


def _caches() -> Iterator[Diagnosis]:
    folder, why = folders.chosen()
    if why is not None:
        yield Diagnosis(
            "caches",
            f"compiled code is not kept for later runs: {why}",
            "set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to",
        )
    else:
        files = [*folder.glob(f"*{CODE_SUFFIX}")]
        size = sum(file.stat().st_size for file in files)
        graphs = f"{len(files)} compiled graph{'s' * (len(files) != 1)}, {size / MIB:.1f} MiB"
        yield Diagnosis("caches", f"{folder}: {graphs}")
        yield from _disk(folder)
    for variable in ("POPTORCH_CACHE_DIR", "POPART_CACHE_DIR"):
        named = env.get(variable)
        problem_with = folders.problem_with(Path(named), on_the_way=False) if named else None
        if problem_with is not None:
            fix = f"set {variable} to a folder that only you can write to, or unset it"
            yield Diagnosis("caches", f"{variable}={named}: {problem_with}", fix)
    if not signed_code.name():
        fix = "set POPTORCH_KEY_FILE to a file that only you can read and write"
        yield Diagnosis("caches", "there is no key to sign compiled code with", fix)


def _disk(folder: Path) -> Iterator[Diagnosis]:
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK:
        text = f"only {free / MIB:.0f} MiB of disk are free for {folder}"
        fix = (
            "run poptorch cache trim to remove old compiled programs, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder on another disk"
        )
        yield Diagnosis("caches", text, fix)


def _threads() -> Iterator[Diagnosis]:
    cores, threads = _cores(), torch.get_num_threads()
    watch = resources.Cores()
    watch.idle()
    time.sleep(WATCHED)
    idle = min(watch.idle(), cores)
    most = max(1, math.floor(cores))
    text = f"{threads} for {cores:g} cores; {idle:.1f} cores are idle now"
    if threads > most:
        fix = f"export OMP_NUM_THREADS={most}, or call torch.set_num_threads({most})"
        yield Diagnosis("threads", f"{text}: the threads wait for one another", fix)
    else:
        yield Diagnosis("threads", text)
    if idle < resources.IDLE:
        yield Diagnosis(
            "", "Compiling waits up to half a minute for a free core, and then takes longer."
        )


def _cores() -> float:
    """Return the number of cores that this process may use, by its CPU affinity and its container's
    limit.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):  # not Linux, or another version of control groups
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _memory() -> Iterator[Diagnosis]:
    free = resources.available_memory()
    text = f"{free / GIB:.1f} GiB free of {resources.memory_size() / GIB:.1f} GiB"
    if free < LEAST_MEMORY:
        fix = "end other programs, or use smaller micro-batches or options.laneMemory(bytes)"
        yield Diagnosis("memory", f"{text}: the C++ compiler may need this much", fix)
    elif resources.memory_can_be_refused():
        text += "; a limit applies to it, so poptorch copies the state before each call"
        yield Diagnosis("memory", text)
    else:
        yield Diagnosis("memory", text)


def _environment() -> Iterator[Diagnosis]:
    for name in env.unknown():
        yield Diagnosis("variables", f"{name} has no effect", f"unset {name}, or correct its name")
