"""Profile reports: where they lie, when they are written, what is in them."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import poptorch
from helpers import programs
from poptorch import _ipu_systems
from poptorch._ipu_model import profile, report_page
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
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., poptorch.Options]:
    """Return what makes options that ask for reports: by the environment, by Python, or by both."""
    monkeypatch.setattr(report_page, "html", lambda content: "page")

    def make(environment: Path | None = None, python: Path | None = None) -> poptorch.Options:
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
    name: str, ask: Callable[..., poptorch.Options], tmp_path: Path
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
    ask: Callable[..., poptorch.Options], tmp_path: Path
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
def test_nothing_is_written_unless_it_is_asked_for(
    ask: Callable[..., poptorch.Options], tmp_path: Path
) -> None:
    poptorch.inferenceModel(Net(), ask().deviceIterations(2)).compile(X)

    assert names(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.spec("runtime", 21, 22)
def test_reports_are_in_a_folder_of_the_working_directory_named_after_the_use_of_the_model(
    ask: Callable[..., poptorch.Options], tmp_path: Path
) -> None:
    poptorch.inferenceModel(Net(), ask().enableProfiling().deviceIterations(2)).compile(X)

    assert names(tmp_path) == {"inference"}
    assert names(tmp_path / "inference") == FILES


@pytest.mark.larger(
    "test_reports_are_in_a_folder_of_the_working_directory_named_after_the_use_of_the_model"
)
@pytest.mark.spec("runtime", 21, 22)
def test_reports_are_in_a_folder_named_after_the_model_if_it_has_a_name(
    ask: Callable[..., poptorch.Options], tmp_path: Path
) -> None:
    opts = ask(python=tmp_path).modelName("mine").deviceIterations(2)

    poptorch.inferenceModel(Net(), opts).compile(X)

    assert names(tmp_path) == {"mine"}


@pytest.mark.slow
@pytest.mark.spec("runtime", 21, 22)
def test_the_folder_of_the_environment_comes_before_that_of_the_options(
    ask: Callable[..., poptorch.Options], tmp_path: Path
) -> None:
    executor = training(ask(environment=tmp_path / "env", python=tmp_path / "ignored"))

    executor.compile(X, Y)

    assert names(tmp_path) == {"env"}
    assert names(tmp_path / "env" / "training") == FILES


class Report(NamedTuple):
    """The contents of the report of a trained model before and after three calls."""

    before: dict[str, Any]
    after: dict[str, Any]
    priced: poptorch.Estimate
    """The estimate of the model."""
    saved: float
    """Cycles that the advice which was given saves; a negative number."""
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the report of a trained model, with one line of advice.

    Programs as small as these are given no advice, so that any will do.
    """
    folder, costs = tmp_path_factory.mktemp("reports"), list[float]()

    def recompute_nothing(adviser: Adviser, before: poptorch.Estimate) -> tuple[Advice, ...]:
        costs.append(adviser.price({"recomputation": False}).cycles - before.cycles)
        return (Advice("recompute nothing", 1.0, costs[-1], True),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "html", lambda content: "page")
        patch.setattr(Adviser, "advice", recompute_nothing)
        opts = poptorch.Options().backend("reference").enableProfiling(folder)
        executor = training(opts.useIpuModel(True))
        executor.compile(X, Y)
        before = profile.read(folder / "training")
        for _ in range(3):
            executor(X, Y)
        priced = executor.estimate(X, Y, system="mk2:2")
        executor.destroy()
    after = profile.read(folder / "training" / "profile.json")
    trace = json.loads((folder / "training" / "trace.json").read_text())
    return Report(before, after, priced, costs[0], trace["traceEvents"])


@pytest.mark.slow
def test_a_report_names_its_format_and_its_model(report: Report) -> None:
    assert report.before["format"] == profile.FORMAT
    assert report.before["name"].endswith("Net, training")


@pytest.mark.slow
def test_a_report_lists_the_guesses(report: Report) -> None:
    assert report.before["estimated"]["guesses"]


@pytest.mark.slow
def test_before_the_first_call_nothing_was_measured(report: Report) -> None:
    assert report.before["measured"]["calls"] == 0


@pytest.mark.slow
def test_calls_are_measured(report: Report) -> None:
    measured = report.after["measured"]

    assert measured["calls"] == 3
    assert len(measured["first"]) == 3
    assert all(call["device"] > 0 for call in measured["first"])


@pytest.mark.slow
def test_the_estimate_is_for_the_system_that_is_modelled(report: Report) -> None:
    assert report.after["target"]["kind"] == "mk2"
    assert report.after["estimated"]["system"] == "mk2:64"
    assert _ipu_systems.system_of().text == "mk2:64"


@pytest.mark.slow
def test_the_estimate_stays_the_same_and_is_that_of_the_method(report: Report) -> None:
    assert report.after["estimated"]["cycles"] == report.before["estimated"]["cycles"]
    assert report.after["estimated"]["cycles"] == report.priced.cycles


@pytest.mark.slow
def test_a_report_has_the_advice(report: Report) -> None:
    assert report.saved < 0
    assert report.after["estimated"]["advice"] == [
        {
            "change": "recompute nothing",
            "saves": 1,
            "costs": report.saved,
            "fits": True,
            "longer": 1.0,
        }
    ]


@pytest.mark.slow
def test_a_report_has_the_settings(report: Report) -> None:
    assert report.after["settings"]["loops.accumulation"] == "3"


@pytest.mark.slow
def test_a_report_names_the_largest_tensors_of_a_chip_and_their_lines(report: Report) -> None:
    """A weight of 8 by 4 numbers, which have 4 bytes."""
    live = {row["name"]: row for row in report.after["estimated"]["chips"][1]["largest"]}

    assert live["param.second.weight"]["bytes"] == 4 * 8 * 4
    assert "self.second(" in live["param.second.weight"]["line"]


@pytest.mark.slow
def test_a_trace_has_an_event_for_each_call(report: Report) -> None:
    calls = [event for event in report.events if event["name"].endswith(": device")]

    assert len(calls) == 3


@pytest.mark.slow
def test_a_trace_has_the_estimated_actions_of_the_ipu(report: Report) -> None:
    of_ipu = {event.get("cat") for event in report.events if event.get("pid") == 0}

    assert {"action", "compute", "exchange", "sync", "host link"} <= of_ipu


class Timed(NamedTuple):
    """What is measured after each of four calls, and the events of the trace."""

    backend: str
    after_call: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        return self.after_call[-1]

    @property
    def products(self) -> list[dict[str, Any]]:
        return [row for row in self.last["operators"] if "mm" in row["name"]]


@pytest.fixture(scope="module", params=["reference", "staged"])
def timed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """Return what is measured in four calls on a backend."""
    folder, measured = tmp_path_factory.mktemp("reports"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "html", lambda content: "page")
        opts = poptorch.Options().backend(request.param).enableProfiling(folder)
        executor = training(opts)
        for _ in range(4):
            executor(X, Y)
            measured.append(profile.read(folder / "training")["measured"])
        executor.destroy()
    trace = json.loads((folder / "training" / "trace.json").read_text())
    return Timed(request.param, measured, trace["traceEvents"])


def test_operators_of_the_first_two_calls_are_timed(timed: Timed) -> None:
    first, second, _, last = (measured["operators"] for measured in timed.after_call)

    assert first
    assert second != first
    assert last == second


def test_every_operator_that_is_timed_takes_time(timed: Timed) -> None:
    assert [row for row in timed.last["operators"] if row["seconds"] <= 0] == []


def test_operators_are_timed_with_their_module_and_direction(timed: Timed) -> None:
    of_products = {(row["module"], row["direction"]) for row in timed.products}

    assert {("first", "F"), ("second", "F"), ("second", "B")} <= of_products


def test_operators_of_the_update_are_timed(timed: Timed) -> None:
    assert "U" in {row["direction"] for row in timed.last["operators"]}


def test_operators_are_timed_with_their_line(timed: Timed) -> None:
    lines = {row["module"]: row["line"] for row in timed.products}

    assert "self.second(" in lines["second"]


def test_actions_are_timed(timed: Timed) -> None:
    """On one chip a call is one step, and with stages each has its own."""
    actions = {row["name"]: row["count"] for row in timed.last["actions"]}

    if timed.backend == "reference":
        assert actions == {"step": 1}
    else:
        assert {"1F2", "1B2", "0U0"} < actions.keys()


def test_a_trace_has_the_operators_within_the_first_call(timed: Timed) -> None:
    operators = [event for event in timed.events if event.get("cat") == "operators"]
    call = next(event for event in timed.events if event["name"] == "call 1: device")
    counts = Counter[str]()
    for row in timed.last["operators"]:
        counts[row["name"]] += row["count"]

    assert Counter(event["name"] for event in operators) == counts
    for event in operators:
        assert call["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= call["ts"] + call["dur"]


@pytest.mark.slow  # starts a process
def test_a_process_that_ends_has_all_its_calls_in_the_report(tmp_path: Path) -> None:
    """There are three calls; the file from call 2 contains two. A child was forked after two."""
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


def test_a_read_only_folder_causes_one_warning_and_training_continues(
    ask: Callable[..., poptorch.Options], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("a file in the place of a folder")
    wrapped = training(ask(python=tmp_path / "full"))

    losses = [wrapped(X, Y).sum() for _ in range(3)]
    wrapped.destroy()

    assert caplog.text.count("The profile report cannot be written") == 1
    assert losses[2] < losses[0]


def test_cycles_are_counted_where_no_report_can_be_written(
    ask: Callable[..., poptorch.Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the estimate."""
    monkeypatch.setenv("POPTORCH_POD", "bow:4")
    (tmp_path / "full").write_text("a file in the place of a folder")
    wrapped = training(ask(python=tmp_path / "full").logCycleCount(True))

    wrapped(X, Y)

    assert wrapped.cycleCount() == round(wrapped.estimate(X, Y, system="bow:2").cycles)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}'])
def test_a_file_that_is_not_a_report_is_refused_with_a_remedy(text: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text)

    with pytest.raises(poptorch.Error, match=r"profile(?s:.*)enableProfiling"):
        profile.read(tmp_path)
