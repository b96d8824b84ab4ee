"""The two tiers: what runs when, what a takeover keeps, which compiler processes are kept."""

import contextlib
import gc
import io
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Graded, Having, normal, options
from poptorch._compile import cache, compiler_processes, registry, tiers
from poptorch.backends.reference import Reference

X, Y = normal(8, 4), normal(8, 2, seed=1)


def training(
    backend: str = "auto",
    lr: float = 0.05,
    iterations: int = 1,
    accumulation: int = 1,
    shown: bool = False,
) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    # With what a takeover could lose; before a norm, a bias would follow rounding errors.
    layers = {"layer": torch.nn.Linear(4, 2, bias=False), "norm": torch.nn.BatchNorm1d(2)}
    net = Graded(both=True, **layers, dropout=torch.nn.Dropout(0.25))
    options = poptorch.Options().backend(backend).showCompilationProgressBar(shown).randomSeed(5)
    options.Training.gradientAccumulation(accumulation)
    options.lanes(1).deviceIterations(iterations).outputMode(poptorch.OutputMode.All)
    return poptorch.trainingModel(net, options, torch.optim.Adam(net.parameters(), lr=lr))


def losses_of(model: poptorch.PoplarExecutor, calls: int) -> list[float]:
    return [model(X, Y)[1].mean().item() for _ in range(calls)]


def until_settled(model: poptorch.PoplarExecutor) -> list[float]:
    """Call until the slow tier's time is over; return the losses."""
    losses = losses_of(model, 1)
    while model._executable.waiting:
        time.sleep(0.3)  # few steps: differences in the last bits grow with their number
        losses += losses_of(model, 1)
    return losses


def compile_at_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let compiling begin with the second call, into the store of a folder."""
    patch.setattr(tiers, "SHARE", 0.0)
    patch.setattr(cache, "default_store", lambda: cache.Store(folder))
    patch.setattr(cache, "_loaded", {})


@pytest.fixture
def eager_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let compiling begin with the second call, into an empty store; return its folder."""
    compile_at_once(monkeypatch, tmp_path)
    return tmp_path


class Takeover(NamedTuple):
    """The results and messages of a model while it ran interpreted, and then in compiled code."""

    model: poptorch.PoplarExecutor
    losses: list[float]
    interpreted_calls: int
    first_plan: str
    printed: list[str]
    store: Path
    loaded: dict[str, Any]


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory) -> Takeover:
    """Train a model until its compiled code has been timed."""
    folder, printed = tmp_path_factory.mktemp("store"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        compile_at_once(patch, folder)
        model = training(shown=True)
        losses = losses_of(model, 1)
        first_plan = str(model.plan())
        losses += until_settled(model)
        calls = len(losses) - 1  # the last one was the first of compiled code
        losses += losses_of(model, tiers.COMPARED)
        lines = printed.getvalue().split("\n")
        # A capture that takes seconds on a busy machine says now and then how far it is.
        lines = [line for line in lines if not re.search(r"% after \d+ s, ", line)]
        return Takeover(model, losses, calls, first_plan, lines, folder, cache._loaded)


@pytest.mark.slow
def test_a_plan_says_which_backend_runs_until_compiled_code_takes_over(takeover: Takeover) -> None:
    expected = "runs on the reference backend until inductor has compiled it"
    assert takeover.first_plan.startswith(expected)


@pytest.mark.slow
def test_a_plan_says_that_compiled_code_has_taken_over(takeover: Takeover) -> None:
    assert str(takeover.model.plan()).startswith("runs on the inductor backend\n")
    assert takeover.model._executable.report().backend == "inductor"


@pytest.mark.slow
def test_the_progress_bar_ends_when_the_graph_is_captured(takeover: Takeover) -> None:
    """The lines after it say what runs since."""
    bar, begun, _, _ = takeover.printed

    assert "Graph compilation: 100%" in bar
    expected = "Graph compilation: captured; the interpreter runs calls while 1 graph compiles"
    assert re.fullmatch(rf"{expected}, for about \d+ s", begun)


@pytest.mark.slow
def test_a_line_says_from_which_call_on_compiled_code_runs_and_how_fast(
    takeover: Takeover,
) -> None:
    *_, fast, _ = takeover.printed

    since = takeover.interpreted_calls + 1
    expected = rf"Graph compilation: full speed from call {since} on: [\d.]+ times as fast, (.*)"
    match = re.fullmatch(expected, fast)
    assert match is not None
    milliseconds = re.findall(r"\d+\.\d\d", match[1])
    assert len(milliseconds) == 2
    assert all(0 < float(each) < 600_000 for each in milliseconds)


@pytest.mark.slow
def test_compiled_code_takes_over_with_all_state_and_random_numbers(takeover: Takeover) -> None:
    reference = training("reference")

    losses = losses_of(reference, len(takeover.losses))

    torch.testing.assert_close(takeover.losses, losses, **near(8 + FUNCTION, 20))
    state, expected = takeover.model.model.state_dict(), reference.model.state_dict()
    torch.testing.assert_close(state, expected, **near(8 + FUNCTION, 20))


@pytest.mark.slow
@pytest.mark.parametrize("process", ["the same process", "another process"])
def test_a_program_with_equal_graphs_has_compiled_code_at_once_in(
    process: str, takeover: Takeover, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_at_once(monkeypatch, takeover.store)
    if process == "the same process":
        monkeypatch.setattr(cache, "_loaded", takeover.loaded)
    second = training(lr=0.01, iterations=4)

    second(X.repeat(4, 1), Y.repeat(4, 1))

    assert second._executable.report().backend == "inductor"


@pytest.mark.slow
def test_compiled_graphs_of_other_processes_take_over(
    eager_to_compile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "SHARE", 1e9)  # it may not compile itself
    monkeypatch.setattr(tiers, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: 0.0)
    model, reference = (training(b, accumulation=2, shown=True) for b in ("auto", "reference"))
    losses, runs = losses_of(model, 2), []
    for name, key in model._executable._code.keys.items():
        function = Reference().interpreted(model.plan().program.graphs[name])

        def run(
            tensors: list[torch.Tensor], name: str = name, function: Callable[..., Any] = function
        ) -> tuple[torch.Tensor, ...]:
            runs.append(name)
            return function(tensors)

        monkeypatch.setitem(cache._loaded, key, run)
        losses += losses_of(model, 2)
        message = (
            f"runs on the reference backend, {name} on inductor, until inductor has compiled it"
        )
        assert str(model.plan()).startswith(
            [message, "runs on the inductor backend\n"][len(runs) > 4]
        )
    assert runs == ["micro"] * 4 + ["micro", "micro", "update"] * 2
    assert "1 of 2 graphs compiled: micro, from call 3 on" in capsys.readouterr().err
    torch.testing.assert_close(losses, losses_of(reference, 6), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize(
    "holder, name, value, message",
    [
        (
            compiler_processes,
            "_CODE",
            "import sys; sys.exit('g++ is on strike')",
            "g++ is on strike",
        ),
        (sys, "executable", "/nowhere/python", "/nowhere/python"),
    ],
)
def test_a_failed_compilation_causes_one_warning_and_the_run_continues(
    holder: Any,
    name: str,
    value: str,
    message: str,
    eager_to_compile: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(holder, name, value)
    model = training()
    losses = losses_of(model, 3)
    losses += until_settled(model) + losses_of(model, 2)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert message in warning
    assert model._executable.report().backend == "reference"
    torch.testing.assert_close(losses, losses_of(training("reference"), len(losses)))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["destroy", "dropped"])
def test_compiling_begins_on_an_idle_core_and_ends_with_the_model(
    way: str, eager_to_compile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, looks = [0.0], []
    if way == "dropped":  # what others compiled is no idle core
        (eager_to_compile / "of others.code").touch()
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: idle[0])
    monkeypatch.setattr(tiers, "SHARE", 1e9)
    monkeypatch.setattr(tiers, "POLL_SECONDS", 600.0)
    monkeypatch.setattr(compiler_processes, "_CODE", "import time; time.sleep(600)")
    model = training()
    losses_of(model, 1)
    monkeypatch.setattr(tiers.PlanCode, "found", lambda self: looks.append(1) or {})
    losses_of(model, 3)
    assert model._executable._job is None
    assert len(looks) == 1  # into the store, where others may have put something
    idle[0] = 1.0
    losses_of(model, 1)
    pid = model._executable._job.processes[0].process.pid
    assert Path(f"/proc/{pid}").exists()
    if way == "destroy":
        model.destroy()
    else:
        del model
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_compiling_for_one_size_ends_when_one_program_serves_all_sizes(
    eager_to_compile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: 1.0)
    monkeypatch.setattr(compiler_processes, "_CODE", "import time; time.sleep(600)")
    model = training()
    losses_of(model, 2)
    job = model._executable._job
    pid = job.processes[0].process.pid
    is_alive = job.end.alive
    del job

    model(X.repeat(2, 1), Y.repeat(2, 1))

    assert is_alive
    assert not Path(f"/proc/{pid}").exists()
    assert model._executable._job is not None  # of the code for all sizes
    model.destroy()


def evaluated(model: poptorch.PoplarExecutor) -> None:
    model.eval()
    model(X)


def with_fewer_rows(model: poptorch.PoplarExecutor) -> None:
    model(X[:4])


@pytest.mark.parametrize(
    "forward, call",
    [
        pytest.param(lambda m, x: m.layer(x), evaluated, id="for another mode"),
        pytest.param(lambda m, x: m.layer(x), with_fewer_rows, id="for all sizes"),
        pytest.param(lambda m, x: m.layer(x) * len(str(x.shape)), with_fewer_rows, id="for a size"),
    ],
)
def test_a_second_program_is_interpreted_until_it_is_compiled(
    forward: Callable[..., Any],
    call: Callable[[poptorch.PoplarExecutor], None],
    eager_to_compile: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: 0.0)
    monkeypatch.setattr(tiers, "SHARE", 1e9)  # neither program is compiled during this test
    module = Having(forward, layer=nn.Linear(4, 2)).train()
    model = poptorch.inferenceModel(module, options("auto").programs(2))
    model(X)
    first = model._executable

    call(model)

    expected = "runs on the reference backend until inductor has compiled it"
    assert model._executable is not first
    assert str(model.plan()).startswith(expected)


@pytest.mark.slow
def test_where_no_core_is_ever_free_compiling_begins_at_low_priority(
    eager_to_compile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: 0.0)
    monkeypatch.setattr(tiers, "SHARE", 1e9)
    monkeypatch.setattr(tiers, "PATIENCE", 0.0)
    monkeypatch.setattr(compiler_processes, "_CODE", "import time; time.sleep(600)")
    model = training(shown=True)
    losses_of(model, 3)
    process = model._executable._job.processes[0]
    nice = os.getpriority(os.PRIO_PROCESS, process.process.pid)
    model.destroy()
    gc.collect()

    assert nice == compiler_processes.LOW
    printed = capsys.readouterr().err
    assert "compiling waits up to 0 s for a free core" in printed
    assert "the interpreter runs calls while 1 graph compiles at low priority" in printed
    assert "still compiling after 0 s, 0 of 1 graph done" in printed


@pytest.mark.slow
def test_a_process_at_low_priority_serves_no_other_program(kept: list[Any]) -> None:
    process = compiler_processes.acquire("inductor")
    process.be_nice()

    compiler_processes.release([process])

    assert not compiler_processes._kept
    assert not process.alive


@pytest.mark.larger("test_compiling_begins_on_an_idle_core_and_ends_with_the_model")
def test_a_compiler_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """No other process holds the other end of the socket, so the way in which it ended does not
    matter.
    """
    process = compiler_processes.CompilerProcess("inductor")
    process.socket.close()
    assert process.process.wait() == -signal.SIGKILL
    process.end()


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
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Processes that answer at once; none is there before or afterwards."""
    monkeypatch.setattr(compiler_processes, "_CODE", REPLYING)
    monkeypatch.setattr(compiler_processes, "_kept", [])
    yield compiler_processes._kept
    compiler_processes.end_kept()


def outcomes(
    process: compiler_processes.CompilerProcess, *keys: str
) -> dict[str, compiler_processes.JobOutcome]:
    process.submit(dict.fromkeys(keys), cache.Store(Path("nowhere")))
    answers: dict[str, compiler_processes.JobOutcome] = {}
    while process.busy:
        select.select([process.socket], [], [])
        answers |= process.poll()
    return answers


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_one_process_serves_program_after_program(kept: list[Any]) -> None:
    process = compiler_processes.acquire("b")
    for keys in (["a"], ["b", "c"]):
        answers = outcomes(process, *keys)
        compiler_processes.release([process])

        assert answers == dict.fromkeys(keys, ("stored", ""))
        assert compiler_processes.acquire("b") is process
    compiler_processes.release([process])


def test_one_of_several_compiler_processes_is_kept_and_the_others_end(kept: list[Any]) -> None:
    first, other = compiler_processes.acquire("b"), compiler_processes.acquire("b")
    outcomes(first, "a")

    compiler_processes.release([first, other])

    assert kept == [first]
    assert not is_there(other.process.pid)


def test_processes_of_a_job_share_its_graphs(kept: list[Any]) -> None:
    job = compiler_processes.CompileJob(
        dict.fromkeys("abc"), "b", cache.Store(Path("nowhere")), processes=2
    )
    at_first = [process.busy for process in job.processes]

    job.wait()

    assert at_first == [True, True]
    assert job.finished
    assert job.outcomes == dict.fromkeys("abc", ("stored", ""))
    job.end()


def test_a_compiler_process_that_is_busy_or_ended_is_not_kept(
    kept: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "poptorch:cpp")
    monkeypatch.setattr(compiler_processes, "_CODE", "import time; time.sleep(600)")
    process = compiler_processes.acquire("b")
    process.submit({"a": None}, cache.Store(Path("nowhere")))
    compiler_processes.release([process])
    assert kept == []
    assert not is_there(process.process.pid)
    monkeypatch.setattr(compiler_processes, "_CODE", "import sys; sys.exit('no memory left')")
    process = compiler_processes.acquire("b")
    process.process.wait()
    message = "the compiler process ended with status 1: no memory left"
    assert outcomes(process, "a") == {"a": ("failed", message)}
    assert message in caplog.text
    process.end()


@pytest.mark.parametrize("change", ["environment", "backend", "ended", "of a parent"])
def test_code_that_cannot_be_used_again_is_compiled_again(
    change: str, kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_processes.warm("b")
    (process,) = kept
    if change == "environment":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    elif change == "ended":
        process.process.kill()
        process.process.wait()
    elif change == "of a parent":
        monkeypatch.setattr(process, "owner", os.getppid())
    another = compiler_processes.acquire("c" if change == "backend" else "b")
    assert another is not process
    assert outcomes(another, "a") == {"a": ("stored", "")}
    assert is_there(process.process.pid) == (change == "of a parent")
    process.end()
    another.end()


def test_wrapping_works_if_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def warm(backend: str) -> None:
        asked.append(backend)
        raise OSError("no more processes")

    monkeypatch.setattr(compiler_processes, "warm", warm)
    monkeypatch.setattr(tiers._cores, "idle", lambda: 1.0)
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    for backend in ("auto", "reference", "inductor"):  # the last one compiles in this process
        poptorch.inferenceModel(nn.Linear(2, 2), options(backend))
    assert asked == ["inductor"]


@pytest.mark.parametrize(
    "name, idle, there, code, works, processes",
    [
        ("inductor", 2.5, False, False, True, 2),
        ("inductor", 0.6, False, False, True, 1),
        ("inductor", 0.5, False, False, True, 0),
        ("inductor", 0.5, True, False, True, 1),
        ("inductor", 2.5, True, True, True, 0),
        ("reference", 2.5, True, False, True, 0),
        ("inductor", 2.5, False, False, False, 0),
    ],
)
def test_idle_cores_import_the_compiler_ahead(
    name: str,
    idle: float,
    there: bool,
    code: bool,
    works: bool,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        compiler_processes, "warm", lambda backend: works or Path("/nowhere").stat()
    )
    monkeypatch.setattr(compiler_processes, "is_running", lambda backend: there)
    monkeypatch.setattr(tiers._cores, "idle", lambda: idle)
    (tmp_path / ("a.code" if code else "a.popef")).touch()
    assert tiers.prepare(registry.choose(name), cache.Store(tmp_path)) == processes
