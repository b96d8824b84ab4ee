"""Kill processes of a job at random moments, and check how the job ends.

The other processes must report which one was killed, nothing may be left behind, and a restarted
job must end as an undisturbed job does.

Usage: PYTHONPATH=tests python benchmarks/kills.py FIRST LAST

The long tests also include such trials (``tests/harden``). Trials with two hosts need root.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import hosts as network
from helpers import job_hosts, job_killed, jobs
from helpers.patience import HANGS, eventually

PROMISED = 20  # seconds from a kill until the others have reported it and ended
KILLS = 4  # in each trial under poprun
MOMENTS = (
    "starting", "compiling", "in a call", job_killed.REDUCING, "exchanging the updated weights",
    "exchanging checkpoints", "saving", "between calls",
)  # fmt: skip


def trial(number: int) -> Iterator[tuple[str, str | None]]:
    """Yield the result of each kill, and any error."""
    draw = random.Random(number)
    if draw.random() < 0.3:
        with tempfile.TemporaryDirectory() as name:
            yield _by_hand(draw, Path(name))
    else:
        yield from _launched(draw)


def _launched(draw: random.Random) -> Iterator[tuple[str, str | None]]:
    """Kill processes or launchers, which the user then starts again, on one host or two."""
    count, hosts = draw.choice(((2, 1), (3, 1), (2, 2)))
    launcher = draw.random() < 0.4
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, temporary = Path(name), Path(name, "temporary")
        temporary.mkdir()
        job_killed.plan(folder, *(_kill(draw, count, launcher) for _ in range(KILLS)))
        module, more, variables = "helpers.jobs", [], {"TMPDIR": str(temporary)}
        if hosts == 2:
            wire = stack.enter_context(network.two_hosts())
            module, (more, own) = "helpers.job_hosts", job_hosts.reached(folder, wire)
            variables |= own
        more += [f"-n{count}", f"--max-restarts={KILLS}", *job_killed.COMMAND, name]
        status, problem = -9, None
        while status == -9 and not problem:
            process = jobs.fork(module, more, folder / "out", jobs.environment(**variables))
            try:
                status = jobs.status(process, seconds=5 * HANGS)
            finally:
                jobs.end([process])
            if not eventually(lambda: not left(folder, temporary), PROMISED):
                problem = f"left: {left(folder, temporary)}"
        text = (folder / "out").read_text()
        if not problem and (status or job_killed.digests([text]) != {undisturbed(count)}):
            problem = f"status {status}, or other weights: {text[-2000:]}"
        what = f"{'launcher' if launcher else 'process'} killed, {hosts} hosts"
        for _ in range(KILLS - len([*folder.glob("kill-*")])):
            yield what, problem
        yield "ended", problem


def _kill(draw: random.Random, count: int, launcher: bool) -> dict[str, object]:
    moment = draw.choice(MOMENTS)
    times = 1 if moment in MOMENTS[:2] else draw.randint(1, 4)
    after = draw.choice((0, draw.uniform(0, 0.005), draw.uniform(0, 0.1)))
    return {"victim": draw.randrange(count), "moment": moment, "times": times, "after": after,
            "launcher": launcher}  # fmt: skip


def left(folder: Path, temporary: Path) -> list[Path]:
    """Return the processes that work in a folder, and the files that launchers keep in another."""
    found = [*temporary.glob("poprun-*")]
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it is gone
            if path.readlink() == folder:
                found.append(path)
    return found


def _by_hand(draw: random.Random, folder: Path) -> tuple[str, str | None]:
    """Kill one of two or three processes without a launcher. Start all of them again."""
    count = draw.choice((2, 2, 3))
    kill = _kill(draw, count, launcher=False)
    victim = int(str(kill["victim"]))
    job_killed.plan(folder, kill)
    processes = jobs.start("helpers.job_killed", [folder], count, folder)
    try:
        ended = jobs.status(processes[victim])
        had_met = all("met" in _printed(folder, index).split() for index in range(count))
        others = [each for each in enumerate(processes) if had_met and each[0] != victim]
        ends = [_outlived(*each, victim, count, folder) for each in others]
    finally:
        jobs.end(processes)
    if not had_met:
        return "killed before all had met", _again(count, folder)
    if not ended:
        return "finished before", None
    problems = [end for end in ends if end not in ("named", "finished")]
    moment = "when others had finished" if "finished" in ends else kill["moment"]
    return f"killed {moment}, by hand", problems[0] if problems else _again(count, folder)


def _outlived(index: int, process: BaseProcess, victim: int, count: int, folder: Path) -> str:
    """Return how a surviving process ends: "named" the killed one, "finished", or an error."""
    try:
        status = jobs.status(process, seconds=PROMISED)
    except TimeoutError:
        return f"process {index} has not ended after {PROMISED} s: {_printed(folder, index)[-300:]}"
    text = _printed(folder, index)
    if status == 1 and f"process {victim} of {count}" in text:
        return "named"
    # A process that continued alone would have other weights, so both had finished their work.
    if status == 0 and job_killed.digests([text]) == {undisturbed(count)}:
        return "finished"
    return f"process {index} ended with {status}: {text[-300:]}"


def _again(count: int, folder: Path) -> str | None:
    """Start all processes again. Return any error in how they end."""
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


if __name__ == "__main__":
    seen = collections.Counter[tuple[str, str | None]]()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        seen.update(trial(number))
        print(number, dict(seen), flush=True)
