"""Compiler processes that are kept: which one is used again, when one is started ahead of time."""

import logging
import os
import select
from pathlib import Path

import pytest
from torch import nn

import poptorch
from helpers.wrapping import options
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
def kept(monkeypatch):
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
    first = helper.acquire("b")
    other = helper.acquire("b")
    for keys in (["a"], ["b", "c"]):
        assert outcomes(first, *keys) == dict.fromkeys(keys, ("stored", ""))
        helper.give_back([first, other])
        assert kept == [first]
        assert not is_there(other.process.pid)
        assert helper.acquire("b") is first
    helper.give_back([first])
    job = helper.CompileJob(dict.fromkeys("abc"), "b", cache.Store(Path("nowhere")), processes=2)
    assert [process.busy for process in job.processes] == [True, True]
    job.wait()
    assert job.finished
    assert job.outcomes == dict.fromkeys("abc", ("stored", ""))
    job.end()


def test_one_that_is_busy_or_has_ended_is_not_kept_and_says_why(kept, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "poptorch:cpp")
    monkeypatch.setattr(helper, "_CODE", "import time; time.sleep(600)")
    process = helper.acquire("b")
    process.ask({"a": None}, cache.Store(Path("nowhere")))
    helper.give_back([process])
    assert kept == []
    assert not is_there(process.process.pid)
    monkeypatch.setattr(helper, "_CODE", "import sys; sys.exit('no memory left')")
    process = helper.acquire("b")
    process.process.wait()
    said = "the compiler process ended with status 1: no memory left"
    assert outcomes(process, "a") == {"a": ("failed", said)}
    assert said in caplog.text
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
    another = helper.acquire("c" if change == "backend" else "b")
    assert another is not process
    assert outcomes(another, "a") == {"a": ("stored", "")}
    assert is_there(process.process.pid) == (change == "of a parent")
    process.end()
    another.end()


def test_wrapping_goes_on_where_no_process_can_be_started(monkeypatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def warm(backend: str) -> None:
        asked.append(backend)
        raise OSError("no more processes")

    monkeypatch.setattr(helper, "warm", warm)
    monkeypatch.setattr(tiers._cores, "idle", lambda: 1.0)
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    for backend in ("auto", "reference", "inductor"):  # the last one compiles in this process
        poptorch.inferenceModel(nn.Linear(2, 2), options(backend))
    assert asked == ["inductor"]
