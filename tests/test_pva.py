"""``pva`` and ``popart`` for scripts that import them, and channels of profiling."""

import dataclasses
import importlib.util
import json
from enum import IntEnum
from pathlib import Path

import pytest
import torch

import popart
import poptorch
import pva
from helpers import pricing, programs
from helpers.data_sets import Numbers
from helpers.pricing import meta, two_stages
from helpers.wrapping import options
from poptorch import Estimate, _ipu_systems
from poptorch._ipu_model import profile
from poptorch.options.popart import LAST_MEMBER


@pytest.fixture(scope="module")
def priced() -> Estimate:
    return pricing.priced(two_stages, meta(8, 64), steps=4, system="bow:2")


@pytest.fixture(scope="module")
def report(priced: Estimate, tmp_path_factory: pytest.TempPathFactory) -> pva.Report:
    measured = profile.Measured("here", 1.0, 3, (), 1)
    content = profile.profile(dataclasses.asdict(priced), _ipu_systems.KINDS["bow"], measured, {})
    path = tmp_path_factory.mktemp("reports") / "profile.json"
    path.write_text(json.dumps(content))
    return pva.openReport(str(path))


TILES = 1472  # of an IPU


def test_the_target_is_two_ipus(report: pva.Report) -> None:
    target = report.compilation.target

    assert target.numTiles == 2 * TILES
    assert target.numIPUs == 2
    assert target.numReplicas == 1
    assert target.totalMemory == 2 * TILES * (624 << 10)
    assert target.clockFrequency == 1.85e9
    assert target.architecture == pva.IPU.Architecture.Ipu2


def test_memory_of_all_tiles_is_that_of_the_estimate(report: pva.Report, priced: Estimate) -> None:
    tiles = report.compilation.tiles

    total = sum(tile.memory.total.includingGaps for tile in tiles)

    assert len(tiles) == 2 * TILES
    assert total == sum(sum(chip.tiles) for chip in priced.chips)


@pytest.mark.parametrize("ipu", [0, 1])
def test_the_fullest_tile_decides_the_memory_of_an_ipu(
    ipu: int, report: pva.Report, priced: Estimate
) -> None:
    tiles = report.compilation.tiles[ipu * TILES : (ipu + 1) * TILES]

    fullest = max(tile.memory.total.includingGaps for tile in tiles)

    assert TILES * fullest == pytest.approx(priced.chips[ipu].bytes, rel=1e-4)


def test_memory_has_gaps(report: pva.Report) -> None:
    memory = report.compilation.tiles[-1].memory.total

    assert memory.excludingGaps < memory.includingGaps


def test_memory_that_is_always_live_is_that_of_the_estimate(
    report: pva.Report, priced: Estimate
) -> None:
    always = sum(variable.size for variable in report.compilation.alwaysLiveVariables)

    assert always == pytest.approx(sum(sum(chip.always.values()) for chip in priced.chips))


def test_temporary_memory_fits_next_to_the_rest(report: pva.Report, priced: Estimate) -> None:
    always = sum(variable.size for variable in report.compilation.alwaysLiveVariables)

    peak = max(s.notAlwaysLiveMemory.bytes for s in report.compilation.livenessProgramSteps)

    assert 0 < peak <= sum(chip.bytes for chip in priced.chips) - always + 1e-6


def test_steps_are_the_actions_of_the_schedule(report: pva.Report, priced: Estimate) -> None:
    steps = report.execution.steps

    assert [step.name for step in steps] == [action.name for action in priced.schedule]


@pytest.mark.parametrize("ipu", [0, 1])
def test_cycles_of_the_steps_add_up_to_those_of_an_ipu(
    ipu: int, report: pva.Report, priced: Estimate
) -> None:
    cycles = sum(step.ipus[ipu].cycles for step in report.execution.steps)

    assert cycles == pytest.approx(priced.chips[ipu].cycles)


def test_a_report_has_all_cycles_and_runs(report: pva.Report, priced: Estimate) -> None:
    assert report.execution.totalCycles == priced.cycles
    assert len(report.execution.runs) == 3


def test_blocks_of_a_tile_follow_one_another(report: pva.Report) -> None:
    """This is the first tile of the second IPU."""
    (first, *_, last) = report.execution.blocks(TILES)

    assert first.name == "1F0"
    assert last.name == "1F3"
    assert first.cyclesTo <= last.cyclesFrom


def test_operations_have_their_cost(report: pva.Report, priced: Estimate) -> None:
    """A product of 2 rows with 64 by 64 numbers, for each of 4 micro-batches."""
    operations = pva.OperationAnalysis(report).operations

    assert [each.debugContext.name for each in operations] == ["0/aten.addmm", "1/aten.addmm"]
    assert operations[0].flops == 4 * 2 * 2 * 64 * 64
    assert operations[0].cycles == priced.operators[0].cycles


def test_the_version_of_a_report_is_that_of_poptorch(report: pva.Report) -> None:
    assert report.version == report.poplarVersion
    assert report.version.string == poptorch.__version__


def test_a_report_has_no_instrumentation(report: pva.Report) -> None:
    assert report.instrumentationSettings.computeInstrumentationLevel == "Off"


def test_the_text_of_a_report_has_as_many_lines_as_are_asked_for(report: pva.Report) -> None:
    report.listPrintLength(1)

    assert len(str(report).splitlines()) == 2


class Computed(pva.ProgramVisitor):
    """Collects what tiles compute, as the tutorial's visitor does."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def visitOnTileExecute(self, program: pva.Program) -> None:  # noqa: N802
        assert program.type == pva.Program.Type.OnTileExecute
        assert program.computeset is not None
        self.names += [program.name] * len(program.computeset.vertices)


def test_a_visitor_of_a_step_sees_the_operations_of_its_tiles(report: pva.Report) -> None:
    step = Computed()

    report.execution.steps[0].program.accept(step)

    assert step.names == ["0/aten.addmm"]


def test_a_visitor_of_the_program_sees_the_operations_of_all_tiles(report: pva.Report) -> None:
    whole = Computed()
    (program,) = report.compilation.programs

    program.accept(whole)

    assert whole.names == ["0/aten.addmm", "1/aten.addmm"]
    assert len(whole.names) == report.compilation.graph.numComputeSets


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of a call with two parts, the first of which has one, and another call."""
    rows = [(0, 100, "call"), (10, 20, "compile"), (12, 5, "trace"), (40, 10, "run"), (200, 1, "x")]
    events = [
        {"ph": "X", "cat": "c", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 2}
        for ts, dur, name in rows
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_events_of_a_trace_are_nested(trace: Path) -> None:
    outer = pva.openTrace(trace).process(1).thread(2).events

    assert [event.label for event in outer] == ["call", "x"]
    assert [event.label for event in outer[0].children()] == ["compile", "run"]
    assert [event.label for event in outer[0].children()[0].children()] == ["trace"]


def test_an_event_of_a_trace_has_a_duration_in_seconds_and_a_channel(trace: Path) -> None:
    call, _ = pva.openTrace(trace).process(1).thread(2).events

    assert call.children()[0].children()[0].duration == pytest.approx(5e-6)
    assert call.channel == "c"


@pytest.mark.parametrize("text", [None, "[" * 100_000], ids=["no file", "nested too deep"])
def test_a_file_that_is_not_a_trace_is_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(poptorch.Error, match="There is no trace to open"):
        pva.openTrace(path)


@pytest.mark.spec("runtime", 23)
@pytest.mark.parametrize("text", ["", '{"enable":"false"}', "[]"])
def test_options_that_say_no_or_nothing_change_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read when the module is imported."""
    monkeypatch.setenv("PVTI_OPTIONS", text)
    spec = importlib.util.find_spec("poptorch.profiling")
    profiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(profiling)
    channel = profiling.Channel("mine")
    data = Numbers(4)  # whose ``__getitem__`` is its class's
    assert channel.instrument(data, "__getitem__") is data
    assert type(data) is Numbers
    with channel.tracepoint("step") as nothing:
        assert nothing is None
    assert ("PVTI_OPTIONS is ignored" in caplog.text) is (text == "[]")


PROGRAM = """
import json, pickle, sys, torch
from torch import nn
import poptorch

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.full((3,), float(index)), torch.tensor(index % 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x, y=None):
        out = self.layer(x)
        return out if y is None else (out, nn.functional.cross_entropy(out, y))

options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
channel = poptorch.profiling.Channel("mine")
numbers = channel.instrument([1, 2], "append")
other = pickle.loads(pickle.dumps(channel.instrument(Data(), "__len__")))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    loader = poptorch.DataLoader(options, Data(), 2)
    assert isinstance(loader.dataset, Data)
    training = poptorch.trainingModel(Net(), options)
    for x, y in loader:
        training(x, y)
    training.copyWeightsToHost()
    training.setOptimizer(torch.optim.SGD(training.model.parameters(), lr=0.1))
    training.destroy()
    with channel.tracepoint("step"):
        len(other), len(numbers)
names = {event.key: event.count for event in profile.key_averages()}
json.dump({name: count for name, count in names.items() if "aten" not in name}, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.spec("runtime", 14)
def test_channels_record_events(tmp_path: Path) -> None:
    ours = programs.with_ours(PVTI_OPTIONS='{"enable":"true","directory":"traces"}')
    done = programs.run("-c", PROGRAM, folder=tmp_path, environment=ours)
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    ours = {name: n for name, n in events.items() if name.startswith(("poptorch.", "dataset", "m"))}
    assert ours == {
        "dataset.__getitem__": 4,
        "mine.step": 1,
        "mine.__len__": 1,
        "poptorch.trainingModel.modelCompilation": 1,
        "poptorch.trainingModel.modelExecution": 2,
        "poptorch.trainingModel.copyWeightsToHost": 1,
        "poptorch.trainingModel.setOptimizer": 1,
        "poptorch.trainingModel.destroy": 1,
    }
    (path,) = (tmp_path / "traces").iterdir()
    (process,) = pva.openTrace(path).processes.values()
    outer = [event for thread in process.threads.values() for event in thread.events]
    calls = [event for event in outer if event.label == "modelExecution"]
    assert len(calls) == 2
    assert [event.label for event in calls[0].children()] == ["modelCompilation"]
    assert all(event.channel == "poptorch.trainingModel" for event in calls)


KEYS = {
    popart.AccumulateOuterFragmentSchedule: "accumulateOuterFragmentSettings.schedule",
    popart.BatchSerializationBatchSchedule: "batchSerializationSettings.batchSchedule",
    popart.RecomputationType: "autoRecomputation",
    popart.SubgraphCopyingStrategy: "subgraphCopyingStrategy",
    popart.SyntheticDataMode: "syntheticDataMode",
    popart.VirtualGraphMode: "virtualGraphMode",
}


@pytest.mark.parametrize("kind", KEYS)
def test_every_member_is_a_value_of_its_key(kind: type[IntEnum], tmp_path: Path) -> None:
    key = KEYS[kind]
    assert sorted(kind) == list(range(len(kind)))
    assert LAST_MEMBER.get(key, max(kind)) == max(kind)
    opts = options()
    opts._Popart.set(key, max(kind))
    executor = poptorch.inferenceModel(torch.nn.ReLU(), opts)
    executor(torch.ones(1))
    stored = executor.options._Popart.options[key]
    assert type(stored) is int
    assert stored == max(kind)
    json.dumps(executor.options.toDict())
    executor.save(tmp_path / "x.poptorch")
    loaded = poptorch.load(tmp_path / "x.poptorch", model=torch.nn.ReLU())
    assert loaded.options._Popart.options[key] == max(kind)


def test_recomputation_is_done() -> None:
    kept = options()
    kept._Popart.set("autoRecomputation", int(popart.RecomputationType.RecomputeAll))
    assert "autoRecomputation" not in str(kept.withoutEffect())
    other = options()
    other._Popart.set("subgraphCopyingStrategy", popart.SubgraphCopyingStrategy.JustInTime)
    assert "subgraphCopyingStrategy" in str(other.withoutEffect())
