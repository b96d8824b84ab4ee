"""Damaged caches of executables: a warning, and the run goes on with right numbers."""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers.wrapped import options
from poptorch._compile import cache
from poptorch._compile.tiers import PlanCode
from poptorch.backends import Compiled, Executable
from poptorch.backends.driver import LoopExecutable, program_report
from poptorch.backends.prepare import prepare

from .models import Gray
from .saved_files import damage


class Toy:
    """A builder whose code is a number: no compiler is waited for."""

    name = "toy"
    graphs: dict[bytes, Any] = {}

    def build(self, graph: Any) -> Any:
        """Keep a graph under a number."""
        kept = f"toy code {len(graph.module.graph.nodes)}".encode()
        self.graphs[kept] = prepare(graph).forward
        self.run, self.kept = self.load(kept), kept
        return self

    def load(self, kept: bytes) -> Compiled:
        """Return what a number stands for."""
        forward = self.graphs[kept]
        return lambda arguments: forward(*arguments)

    def assemble(self, plan: Any, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        """Put the graphs of a plan together."""
        return LoopExecutable(plan, functions, program_report(self.name, plan.program, seconds))

    def conditions(self) -> dict[str, str]:
        """It depends on nothing."""
        return {}


@functools.cache
def subject() -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """A plan, an input, what comes out, and the state."""
    torch.manual_seed(0)
    wrapper = poptorch.inferenceModel(Gray(), options())
    x = torch.randn(4, 1, 6, 6)
    expected = wrapper(x)
    return wrapper.plan(), x, expected, wrapper._session.store.state


def compiled(folder: Path) -> Executable:
    """Compile with the cache of a folder."""
    plan, *_ = subject()
    cache._loaded.clear()
    store, facts = cache.store_of(str(folder)), cache.facts_of(plan, "toy", {})
    cache.log_hit_or_miss(store.folder, facts)
    executable = PlanCode(plan, Toy(), store).compile(lambda share: None)
    store.note(facts)
    return executable


@functools.cache
def _whole() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    compiled(Path(folder.name))
    return folder


def trial(number: int) -> Iterator[tuple[str, str | None]]:
    """Damage one entry of a cache, or what is around it."""
    draw = random.Random(number)
    _, x, expected, state = subject()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "cache"
        shutil.copytree(_whole().name, folder)
        how = _damage(draw, folder)
        problem = None
        try:
            for _ in range(2):  # what the first one repairs or leaves the second one meets
                got = compiled(folder).run(state, [x])
                if not torch.equal(got[0], expected):
                    problem = "other numbers"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if folder.is_dir() and not folder.is_symlink():
            os.chmod(folder, 0o700)
    yield "ran on", problem and f"{how}: {problem}"


def _damage(draw: random.Random, folder: Path) -> str:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    path = draw.choice([*paths, *paths, *paths, folder])
    if path.is_file():
        if path.suffix == ".lock" or not path.stat().st_size:
            path.unlink()
            what = draw.choice(["pipe", "folder", "link"])
            if what == "pipe":
                os.mkfifo(path)
            elif what == "folder":
                path.mkdir()
            else:
                path.symlink_to("/nonexistent/there")
            return f"{path.suffix}: {what}"
        return f"{path.suffix}: {damage(draw, path)}" if path.suffix == ".popef" else _code(
            draw, path
        )  # fmt: skip
    what = draw.choice(["gone", "file", "open", "link", "pipe"])
    if what == "open":
        os.chmod(path, 0o777)
        return f"{path.name}: everybody may write"
    shutil.rmtree(path)
    if what == "file":
        path.write_bytes(b"")
    elif what == "link":
        path.symlink_to("/nonexistent/there")
    elif what == "pipe":
        os.mkfifo(path)
    return f"{path.name}: {what}"


def _code(draw: random.Random, path: Path) -> str:
    from .saved_files import _bytes, _cut, _inserted, _parts, _replaced, _zeros

    way = draw.choice((_bytes, _cut, _inserted, _parts, _replaced, _zeros))
    way(draw, path)
    return f"{path.suffix}: {way.__name__}"
