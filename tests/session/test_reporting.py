"""Profile reports: where they lie, when they are written, what is in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers import programs
from poptorch import _systems
from poptorch._ipu_model import page, profile
from poptorch._ipu_model.advice import Adviser
from poptorch._ipu_model.parts import Advice

X, Y = torch.ones(12, 8), torch.zeros(12, dtype=torch.long)
FILES = {"profile.json", "profile.pop", "trace.json", "report.html"}


class Net(torch.nn.Module):
    """Two linear layers on two chips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        poptorch.BeginBlock(self.second, "second", ipu_id=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.second(torch.relu(self.first(x)))
        return out if y is None else torch.nn.functional.cross_entropy(out, y)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Options that ask for reports: by the environment, by Python, or by both."""
    monkeypatch.setattr(page, "html", lambda content: "page")

    def make(environment=None, python: Path | None = None) -> poptorch.Options:
        if environment is not None:
            chosen = {"autoReport.all": "true", "autoReport.directory": str(environment)}
            monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(chosen))
        opts = poptorch.Options().backend("reference")
        return opts if python is None else opts.enableProfiling(python)

    monkeypatch.chdir(tmp_path)
    return make


def training(opts: poptorch.Options) -> poptorch.PoplarExecutor:
    opts.Training.gradientAccumulation(3)
    model = Net()
    return poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "..", "org/model"])
def test_no_name_of_a_model_leaves_the_folder_of_reports(
    name: str, ask: Callable[..., Any], tmp_path: Path
) -> None:
    reports = tmp_path / "a" / "reports"
    model = poptorch.inferenceModel(torch.nn.Linear(8, 8), ask(python=reports).modelName(name))
    model(X)
    model.destroy()
    (folder,) = reports.iterdir()
    assert folder.name == name.replace("/", "_").replace("..", "__" if name == ".." else "..")
    assert names(folder) == FILES
    assert names(tmp_path) == {"a"}


def test_a_link_in_the_folder_of_reports_is_replaced_and_not_followed(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "reports" / "inference"
    mine.write_text("mine")
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).symlink_to(mine)
    model = poptorch.inferenceModel(torch.nn.Linear(8, 8), ask(python=tmp_path / "reports"))
    model(X)
    model.destroy()
    assert mine.read_text() == "mine"
    assert not [path for path in folder.iterdir() if path.is_symlink()]


@pytest.mark.slow
@pytest.mark.spec("runtime", 21, 22)
def test_reports_lie_in_a_folder_named_after_the_model_or_its_use(ask, tmp_path: Path) -> None:
    poptorch.inferenceModel(Net(), ask().deviceIterations(2)).compile(X)
    assert not names(tmp_path)  # nothing is written unless it is asked for
    poptorch.inferenceModel(Net(), ask().enableProfiling().deviceIterations(2)).compile(X)
    assert names(tmp_path) == {"inference"}  # in the working directory
    opts = ask(environment=tmp_path / "env", python=tmp_path / "ignored")
    executor = training(opts.clone())
    executor.compile(X, Y)
    del executor
    poptorch.inferenceModel(Net(), opts.modelName("mine").deviceIterations(2)).compile(X)
    assert names(tmp_path / "env") == {"training", "mine"}
    assert all(names(folder) == FILES for folder in (tmp_path / "env").iterdir())
    assert not (tmp_path / "ignored").exists()


@pytest.mark.slow
def test_the_report_has_the_estimate_its_advice_and_what_was_measured(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs as small as these are given no advice, so that any will do."""
    costs = []

    def everything(adviser: Adviser, before) -> tuple[Advice, ...]:
        costs.append(adviser.price({"recomputation": False}).cycles - before.cycles)
        return (Advice("recompute nothing", 1.0, costs[-1], True),)

    monkeypatch.setattr(Adviser, "advice", everything)
    executor = training(ask(python=tmp_path).useIpuModel(True))
    executor.compile(X, Y)
    before = profile.read(tmp_path / "training")
    assert before["format"] == profile.FORMAT
    assert before["name"].endswith("Net, training")
    assert before["estimated"]["guesses"]
    assert before["measured"]["calls"] == 0
    for _ in range(3):
        executor(X, Y)
    priced = executor.estimate(X, Y, system="mk2:2")
    executor.destroy()
    after = profile.read(tmp_path / "training" / "profile.json")
    assert after["measured"]["calls"] == len(after["measured"]["first"]) == 3
    assert all(call["device"] > 0 for call in after["measured"]["first"])
    assert after["target"]["kind"] == "mk2"
    assert after["estimated"]["system"] == _systems.system_of().text == "mk2:64"
    assert after["estimated"]["cycles"] == before["estimated"]["cycles"] == priced.cycles
    line = {
        "change": "recompute nothing",
        "saves": 1,
        "costs": costs[0],
        "fits": True,
        "longer": 1.0,
    }
    assert after["estimated"]["advice"] == [line]
    assert costs[0] < 0
    assert after["settings"]["loops.accumulation"] == "3"
    live = {row["name"]: row for row in after["estimated"]["chips"][1]["largest"]}
    assert live["param.second.weight"]["bytes"] == 4 * 8 * 4
    assert "self.second(" in live["param.second.weight"]["line"]
    events = json.loads((tmp_path / "training" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"].endswith(": device") for event in events) == 3
    assert {event["cat"] for event in events if event.get("pid") == 0 and "cat" in event} >= {
        "action",
        "compute",
        "exchange",
        "sync",
        "host link",
    }


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_actions_and_operators_of_the_first_calls_are_timed_here(
    ask: Callable[..., Any], tmp_path: Path, backend: str
) -> None:
    executor, ones = training(ask(python=tmp_path).backend(backend)), []
    for _ in range(4):
        executor(X, Y)
        ones.append(profile.read(tmp_path / "training")["measured"])
    executor.destroy()
    first, *_, last = ones
    assert first["operators"]
    assert first["operators"] != last["operators"] == ones[1]["operators"]  # two calls are timed
    products = [row for row in last["operators"] if "mm" in row["name"]]
    modules = {(row["module"], row["direction"]) for row in products}
    assert modules >= {("first", "F"), ("second", "F"), ("second", "B")}
    assert all(row["seconds"] > 0 for row in last["operators"])
    assert "self.second(" in {row["module"]: row["line"] for row in products}["second"]
    assert any(row["direction"] == "U" for row in last["operators"])
    names = {row["name"]: row["count"] for row in last["actions"]}
    assert names == {"step": 1} if backend == "reference" else {"1F2", "1B2", "0U0"} < names.keys()
    events = json.loads((tmp_path / "training" / "trace.json").read_text())["traceEvents"]
    here = [event for event in events if event.get("cat") == "operators"]
    assert len(here) == sum(row["count"] for row in last["operators"])
    calls = [event for event in events if event["name"] == "call 1: device"]
    assert all(calls[0]["ts"] <= event["ts"] for event in here)
    assert all(e["ts"] + e["dur"] <= calls[0]["ts"] + calls[0]["dur"] for e in here)


@pytest.mark.slow  # starts a process
def test_a_process_that_ends_has_all_its_calls_in_the_report(tmp_path: Path) -> None:
    """Three calls, of which the file after call 2 knows two; a child that was forked after two."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch, poptorch\n"
        "options = poptorch.Options().backend('reference').enableProfiling(sys.argv[1])\n"
        "model = poptorch.inferenceModel(torch.nn.Linear(4, 2).eval(), options)\n"
        "x = torch.ones(3, 4)\n"
        "model(x), model(x), model(x)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    model._session.reports._count = 7\n"
        "    sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert programs.run(script, tmp_path).returncode == 0
    assert profile.read(tmp_path / "inference")["measured"]["calls"] == 3


def test_a_folder_that_cannot_be_written_to_is_one_warning(
    ask: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("POPTORCH_POD", "bow:4")
    (tmp_path / "full").write_text("a file in the place of a folder")
    wrapped = training(ask(python=tmp_path / "full").logCycleCount(True))
    losses = [wrapped(X, Y).sum() for _ in range(3)]
    cycles = wrapped.estimate(X, Y, system="bow:2").cycles
    assert wrapped.cycleCount() == round(cycles)  # those of the estimate
    wrapped.destroy()
    assert losses[2] < losses[0]
    assert caplog.text.count("The profile report cannot be written") == 1
    for text in ("", "[]", '{"format": 0}'):
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(poptorch.Error, match=r"profile(?s:.*)enableProfiling"):
            profile.read(tmp_path)
