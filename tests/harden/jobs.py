"""Processes killed at any moment: the others say which, and this file starts all of them again."""

import functools
import random
import tempfile
import time
from pathlib import Path

from helpers import job_killed, jobs
from helpers.patience import eventually

PROMISED = 20  # seconds from a kill until the others have ended and said who it was
MOMENTS = ("starting", "compiling", "in a call", "saving", "between calls")


def trial(number: int):
    """Kill one process of two or three at a moment of one kind; start all of them again."""
    with tempfile.TemporaryDirectory() as name:
        yield _killed(random.Random(number), Path(name))


def _killed(draw: random.Random, folder: Path) -> tuple[str, str | None]:
    count = draw.choice((2, 2, 3))
    moment, victim = draw.choice(MOMENTS), draw.randrange(count)
    times = draw.randint(1, 6) if moment not in ("starting", "compiling") else 1
    processes = jobs.start("helpers.job_killed", [folder], count, folder)
    try:
        eventually(lambda: _printed(folder, victim).splitlines().count(moment) >= times)
        time.sleep(draw.choice((0, draw.uniform(0, 0.01), draw.uniform(0, 0.2))))
        had_met = all("met" in _printed(folder, index).split() for index in range(count))
        processes[victim].kill()
        others = [each for each in enumerate(processes) if had_met and each[0] != victim]
        ends = [_outlived(*each, victim, count, folder) for each in others]
    finally:
        jobs.end(processes)
    if not had_met:
        return "killed before all had met", _again(count, folder)
    problems = [end for end in ends if end not in ("named", "finished")]
    what = "killed when others had finished" if "finished" in ends else f"killed {moment}"
    return what, problems[0] if problems else _again(count, folder)


def _outlived(index: int, process: jobs.BaseProcess, victim: int, count: int, folder: Path) -> str:
    """Return how a process ends that outlives another: "named" it, "finished", or what is wrong."""
    try:
        status = jobs.status(process, PROMISED)
    except TimeoutError:
        return f"process {index} has not ended after {PROMISED} s: {_printed(folder, index)[-300:]}"
    text = _printed(folder, index)
    if status == 1 and f"process {victim} of {count}" in text:
        return "named"
    # Whoever went on alone would have other weights; so the work of both was done before.
    if status == 0 and job_killed.digests([text]) == {undisturbed(count)}:
        return "finished"
    return f"process {index} ended with {status}: {text[-300:]}"


def _again(count: int, folder: Path) -> str | None:
    """Start all processes again; return what is wrong with how they end."""
    for index, (status, text) in jobs.run("helpers.job_killed", [folder], count, folder).items():
        if status:
            return f"again, process {index} ended with {status}: {text[-300:]}"
        if job_killed.digests([text]) != {undisturbed(count)}:
            return f"again, process {index} has other weights: {text[-300:]}"
    return None


@functools.cache
def undisturbed(count: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ended = jobs.run("helpers.job_killed", [folder], count, Path(folder))
    (digest,) = job_killed.digests(text for _, text in ended.values())
    return digest


def _printed(folder: Path, index: int) -> str:
    path = folder / f"{index}.out"
    return path.read_text() if path.exists() else ""
