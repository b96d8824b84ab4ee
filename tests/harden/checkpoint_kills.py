"""Kills during ``Checkpoints.save`` leave a complete checkpoint; ``resume`` takes the newest.

The numbers of the saves tell which checkpoint is the newest one: a state that is kept with each.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, training
from poptorch._base import archive

OLDER = (50, 60)  # steps of an older run
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "open")


class Number:
    """A state that says which save it is of."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def made(folder: Path, keep: int) -> tuple[poptorch.Checkpoints, Number]:
    """Return the checkpoints of a run, and the number that is kept in each."""
    model = Having(lambda m, x: poptorch.identity_loss(m.layer(x), "sum"), layer=nn.Linear(2, 1))
    number = Number()
    return poptorch.Checkpoints(folder, training(model), [], keep=keep, number=number), number


def saving(
    folder: Path, keep: int, steps: Iterator[int], waits: bool = True, first: int = 1
) -> Iterator[int]:
    """Save at each of the steps; yield the number of each save that has returned."""
    checkpoints, number = made(folder, keep)
    number.number = first - 1
    checkpoints._executor.compile(torch.ones(1, 2))
    for checkpoints.step in steps:
        number.number += 1
        checkpoints.save(wait=waits)
        if not waits:
            checkpoints.wait()
        yield number.number


def with_older_run(folder: Path) -> None:
    """Leave what a run with more steps has saved."""
    for _ in saving(folder, len(OLDER), iter(OLDER), first=-9):
        pass


def forked(do: Callable[[int], None]) -> tuple[int, int]:
    """Do something in a forked process; return its number and where what it writes is read."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        return child, read
    try:
        do(write)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def last_number(read: int) -> int:
    """Return the number of the last save that has returned; 0 if there is none."""
    with os.fdopen(read, "rb") as file:
        return len(file.read())


def problem_of(folder: Path, keep: int, reported: int) -> str | None:
    """Return what is wrong with the files of a killed process, after a number of finished saves."""
    named = [path for path in folder.iterdir() if path.name.isdecimal()]
    for path in named:
        for name in ("model.poptorch", "process-0"):
            archive.read(path / name)
    checkpoints, number = made(folder, keep)
    if not checkpoints.resume():
        return f"nothing is complete after {reported} saves" if reported else None
    if number.number not in (reported, reported + 1):
        return f"resumed save {number.number} after {reported} saves"
    return None


def trial(number: int) -> Iterator[tuple[str, str | None]]:
    draw = random.Random(number)
    keep, older, one_step = draw.choice((1, 2, 3)), draw.random() < 0.5, draw.random() < 0.5
    waits, delay = draw.random() < 0.5, draw.uniform(0.0, 0.05)
    what = f"keep={keep}, older run: {older}, one step: {one_step}, waits: {waits}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if older:
            with_older_run(folder)

        def save_on(write: int) -> None:
            steps = iter(lambda: 5, 0) if one_step else iter(range(1, 10**6))
            for _ in saving(folder, keep, steps, waits):
                os.write(write, b".")

        child, read = forked(save_on)
        first = os.read(read, 1)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = len(first) + last_number(read)
        problem = problem_of(folder, keep, reported)
        yield "killed", problem and f"{what}: {problem}"


def killed_before(folder: Path, operation: int, save: Callable[[], Any]) -> bool:
    """Save in a forked process that is killed before a file operation; return whether it was."""

    def save_and_be_killed(_: int) -> None:
        left = operation

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            paths = [each for each in arguments if isinstance(each, str | Path)]
            if event in EVENTS and any(str(path).startswith(str(folder)) for path in paths):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        save()

    child, read = forked(save_and_be_killed)
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
