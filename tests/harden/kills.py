"""Processes that are killed while they save or compile: whole files, and nothing left over."""

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
from helpers.patience import eventually
from helpers.wrapped import options
from poptorch._compile.cache import Store
from poptorch._compile.helper import CompileJob

from .models import Gray, Statistics

OWN = f"poptorch-code-{os.getuid()}"  # for compiled code, of this process and all later ones
COMPILING = 20  # one of so many is killed while it compiles


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
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        kind = _compiling if number % COMPILING == 0 else _saving
        yield kind(draw, Path(folder))


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


def _compiling(draw: random.Random, folder: Path) -> tuple[str, str | None]:
    wrapper = poptorch.inferenceModel(Gray(), options())
    wrapper(torch.randn(4, 1, 6, 6))
    graphs = {f"key{draw.random()}": next(iter(wrapper.plan().program.graphs.values()))}

    def compile_it() -> None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # the compiler process's too
        job = CompileJob(graphs, "inductor", Store(folder / "code"))
        (folder / "asked").touch()
        job.wait()
        time.sleep(100)

    pid = in_a_process(compile_it)
    assert eventually((folder / "asked").exists)
    time.sleep(draw.uniform(0, 2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wrapper.destroy()
    left = [p.name for p in folder.iterdir() if p.name not in ("asked", "code", OWN)]
    return "killed while compiling", f"left over: {left}" if left else None
