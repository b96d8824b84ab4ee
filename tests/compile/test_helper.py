"""Compiler processes that are kept: which one is used again, when one is started ahead of time."""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import options
from poptorch import backends
from poptorch._compile import cache, helper, tiers

REPLYING = """
# {backend}
import json, os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(b"{{}}\\n")
while True:
    received, handles, *_ = socket.recv_fds(channel, 1, 1)
    if not received:
        break
    for key in json.load(os.fdopen(handles[0]))["graphs"]:
        channel.sendall(json.dumps({{key: ("stored", "")}}).encode() + b"\\n")
"""


@pytest.fixture
def kept(monkeypatch) -> Iterator[list[helper.CompilerProcess]]:
    """Processes that answer at once; none is there before or afterwards."""
    monkeypatch.setattr(helper, "_CODE", REPLYING)
    monkeypatch.setattr(helper, "_kept", [])
    yield helper._kept
    helper.end_kept()


def outcomes(process: helper.CompilerProcess, *keys: str) -> dict[str, helper.Outcome]:
    process.ask(dict.fromkeys(keys), cache.Store(Path("nowhere")))
    answers: dict[str, helper.Outcome] = {}
    while process.busy:
        select.select([process.socket], [], [])
        answers |= process.look()
    return answers


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_one_process_serves_program_after_program(kept) -> None:
    first = helper.take("b")
    other = helper.take("b")
    for keys in (["a"], ["b", "c"]):
        assert outcomes(first, *keys) == dict.fromkeys(keys, ("stored", ""))
        helper.give_back([first, other])
        assert kept == [first]
        assert not is_there(other.process.pid)
        assert helper.take("b") is first
    helper.give_back([first])


def test_one_that_is_busy_or_has_ended_is_not_kept_and_says_why(kept, monkeypatch) -> None:
    monkeypatch.setattr(helper, "_CODE", "import time; time.sleep(600)")
    process = helper.take("b")
    process.ask({"a": None}, cache.Store(Path("nowhere")))
    helper.give_back([process])
    assert kept == []
    assert not is_there(process.process.pid)
    monkeypatch.setattr(helper, "_CODE", "import sys; sys.exit('no memory left')")
    process = helper.take("b")
    process.process.wait()
    assert outcomes(process, "a") == {
        "a": ("failed", "the compiler process ended with status 1: no memory left")
    }
    process.end()


@pytest.mark.long
def test_what_is_printed_in_a_compiler_process_goes_to_its_log(tmp_path: Path, monkeypatch) -> None:
    """A sitecustomize that prints, for example, which every process of some machines has."""
    (tmp_path / "sitecustomize.py").write_text("print('Welcome to the cluster')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(helper, "_kept", [])
    process = helper.take("inductor")
    model = poptorch.inferenceModel(nn.Linear(2, 2), options())
    model.compile(torch.ones(1, 2))
    (graph,) = model.plan().program.graphs.values()
    process.ask({"key": graph}, cache.Store(tmp_path / "store"))
    while not (answers := process.look()):
        select.select([process.socket], [], [])
    assert answers == {"key": (helper.STORED, "")}
    process._log.seek(0)
    assert b"Welcome to the cluster" in process._log.read()
    process.end()


@pytest.mark.parametrize("change", ["environment", "backend", "ended", "of a parent"])
def test_what_cannot_be_used_again_is_not(change: str, kept, monkeypatch) -> None:
    helper.warm("b")
    (process,) = kept
    if change == "environment":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    elif change == "ended":
        process.process.kill()
        process.process.wait()
    elif change == "of a parent":
        monkeypatch.setattr(process, "owner", os.getppid())
    another = helper.take("c" if change == "backend" else "b")
    assert another is not process
    assert outcomes(another, "a") == {"a": ("stored", "")}
    assert is_there(process.process.pid) == (change == "of a parent")
    process.end()
    another.end()


def test_a_process_that_is_there_has_the_core_that_was_idle(
    kept: list[helper.CompilerProcess], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)
    inductor, store = backends.available()["inductor"], cache.Store(tmp_path)
    assert tiers.prepare(inductor, store) == 0
    helper.warm("inductor")
    assert tiers.prepare(inductor, store) == 1
    kept[0].end()
    assert tiers.prepare(inductor, store) == 0


def test_a_process_says_when_it_has_imported_the_compiler(kept, monkeypatch) -> None:
    monkeypatch.setattr(helper, "_CODE", "# {backend}\nimport time\ntime.sleep(600)")
    helper.warm("b")
    assert helper.is_there("b")
    assert not helper.is_there("b", imported=True)
    helper.end_kept()
    monkeypatch.setattr(helper, "_CODE", REPLYING)
    helper.warm("b")
    while not helper.is_there("b", imported=True):
        assert kept[0].alive
        select.select([kept[0].socket], [], [])
    assert not helper.is_there("c", imported=True)
    assert outcomes(kept[0], "a") == {"a": ("stored", "")}


def test_garbage_is_looked_for_rarely_while_this_process_compiles(
    monkeypatch, tmp_path: Path
) -> None:
    seen, before = [], gc.get_threshold()
    monkeypatch.setattr(
        cache.Store,
        "function",
        lambda self, key, graph, builder: seen.append(gc.get_threshold()[0]),
    )
    own = tiers.PlanCode.__new__(tiers.PlanCode)
    own.builder, own.store = backends.available()["inductor"], cache.Store(tmp_path)
    own._build("key", None)
    assert seen == [helper.COLLECTING]
    assert gc.get_threshold() == before


ASKED = {  # whether the compiler is imported ahead
    "auto": ({}, True),
    "optimise": ({"backend": "optimise"}, True),
    "optimise by variable": ({"variable": "optimise"}, True),
    "reference by variable": ({"variable": "reference"}, False),
    "reference": ({"backend": "reference"}, False),
    "this process compiles": ({"backend": "inductor"}, False),
    "no core is idle": ({"idle": 0.2}, False),
    "something has been compiled": ({"is_empty": False}, False),
    "stages on several processes": ({"stages": 2}, False),
    "no more processes": ({"failure": OSError("no more processes")}, True),
}


@pytest.mark.parametrize("case", ASKED)
def test_wrapping_has_the_compiler_imported_where_it_will_be_needed_and_a_core_is_idle(
    case: str, monkeypatch, tmp_path: Path
) -> None:
    given, asked = ASKED[case]
    warmed: list[str] = []

    def warm(backend: str) -> None:
        warmed.append(backend)
        if "failure" in given:
            raise given["failure"]

    if not given.get("is_empty", True):
        (tmp_path / f"key{cache.CODE_SUFFIX}").touch()
    monkeypatch.setattr(helper, "warm", warm)
    monkeypatch.setattr(tiers._cores, "idle", lambda: given.get("idle", 1.0))
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    monkeypatch.setenv("POPTORCH_BACKEND", given.get("variable", ""))
    chosen = poptorch.Options().backend(given.get("backend", "auto"))
    if "stages" in given:
        chosen.Distributed.configureProcessId(0, 2).stageProcesses(given["stages"])
    poptorch.inferenceModel(nn.Linear(2, 2), chosen)
    assert warmed == ["inductor"] * asked
    net = nn.Linear(2, 2)
    poptorch.trainingModel(net, chosen, torch.optim.SGD(net.parameters(), lr=0.1))
    assert warmed == ["inductor"] * asked * 2
