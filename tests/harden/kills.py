"""Processes that are killed while they save: whole files, and nothing left over."""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers.wrapped import options

from .models import Statistics


@functools.cache
def subject() -> tuple[Any, poptorch.PoplarExecutor]:
    """A model that is saved again and again."""
    model = Statistics()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = poptorch.trainingModel(model, options(), optimizer)
    wrapper(torch.randn(4, 4), torch.randn(4, 3))
    return model, wrapper


def in_a_process(work: Any) -> int:
    """Run something in a forked process until it is killed; return its number."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def trial(number: int) -> Iterator[tuple[str, str | None]]:
    """Kill one process."""
    with tempfile.TemporaryDirectory() as folder:
        yield _saving(random.Random(number), Path(folder))


def _saving(draw: random.Random, folder: Path) -> tuple[str, str | None]:
    model, wrapper = subject()
    path = folder / "model.poptorch"
    wrapper.save(str(path))

    def save() -> None:
        while True:
            wrapper.save(str(path))

    pid = in_a_process(save)
    time.sleep(draw.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    torn = [p.name for p in folder.iterdir() if p != path]
    twin = Statistics()
    optimizer = poptorch.optim.Adam(twin.parameters(), lr=0.1)
    loaded = poptorch.load(str(path), model=twin, optimizer=optimizer)
    weights = model.state_dict()
    same = all(torch.equal(t, weights[n]) for n, t in twin.state_dict().items())
    loaded.destroy()
    wrapper.save(str(path))
    left = [p.name for p in folder.iterdir() if p != path]
    outcome = "killed with half a file" if torn else "killed while saving"
    if left:
        return outcome, f"left over: {left}"
    return outcome, None if same else "the file is not whole"
