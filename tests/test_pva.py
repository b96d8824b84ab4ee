"""``pva``: scripts that walk a report of libpva's run on ours."""

import dataclasses
import json
from pathlib import Path

import pytest

import poptorch
import pva
from helpers import pricing
from helpers.pricing import meta, two_stages
from poptorch import Estimate, _systems
from poptorch._ipu_model import profile


@pytest.fixture(scope="module")
def priced() -> Estimate:
    return pricing.priced(two_stages, meta(8, 64), steps=4, system="bow:2")


@pytest.fixture(scope="module")
def report(priced: Estimate, tmp_path_factory: pytest.TempPathFactory) -> pva.Report:
    measured = profile.Measured("here", 1.0, 3, (), 1)
    content = profile.profile(dataclasses.asdict(priced), _systems.KINDS["bow"], measured, {})
    path = tmp_path_factory.mktemp("reports") / "profile.json"
    path.write_text(json.dumps(content))
    return pva.openReport(str(path))


def test_target_and_memory(report: pva.Report, priced: Estimate) -> None:
    target = report.compilation.target
    assert (target.numTiles, target.numIPUs, target.numReplicas) == (2 * 1472, 2, 1)
    assert target.totalMemory == 2 * 1472 * (624 << 10)
    assert target.clockFrequency == 1.85e9
    assert target.architecture == pva.IPU.Architecture.Ipu2
    tiles = report.compilation.tiles
    assert len(tiles) == target.numTiles
    total = sum(tile.memory.total.includingGaps for tile in tiles)
    assert total == sum(sum(chip.tiles) for chip in priced.chips)
    first, second = (max(t.memory.total.includingGaps for t in tiles[a:b])
                     for a, b in ((0, 1472), (1472, 2944)))  # fmt: skip
    whole = [1472 * fullest for fullest in (first, second)]
    assert whole == pytest.approx([chip.bytes for chip in priced.chips], rel=1e-4)
    assert tiles[-1].memory.total.excludingGaps < tiles[-1].memory.total.includingGaps
    always = sum(variable.size for variable in report.compilation.alwaysLiveVariables)
    peak = max(s.notAlwaysLiveMemory.bytes for s in report.compilation.livenessProgramSteps)
    assert always == pytest.approx(sum(sum(chip.always.values()) for chip in priced.chips))
    assert 0 < peak <= sum(chip.bytes for chip in priced.chips) - always + 1e-6


def test_execution_and_operations(report: pva.Report, priced: Estimate) -> None:
    steps = report.execution.steps
    assert [step.name for step in steps] == [action.name for action in priced.schedule]
    for chip in priced.chips:
        assert sum(s.ipus[chip.chip].cycles for s in steps) == pytest.approx(chip.cycles)
    assert (report.execution.totalCycles, len(report.execution.runs)) == (priced.cycles, 3)
    (first, *_, last) = report.execution.blocks(1472)
    assert (first.name, last.name) == ("1F0", "1F3")
    assert first.cyclesTo <= last.cyclesFrom
    operations = pva.OperationAnalysis(report).operations
    assert [each.debugContext.name for each in operations] == ["0/aten.addmm", "1/aten.addmm"]
    assert operations[0].flops == 4 * 2 * 2 * 64 * 64  # micro-batches of 2
    assert operations[0].cycles == priced.operators[0].cycles
    assert report.version == report.poplarVersion
    assert report.version.string == poptorch.__version__
    assert report.instrumentationSettings.computeInstrumentationLevel == "Off"
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


def test_visitors(report: pva.Report) -> None:
    step, whole = Computed(), Computed()
    report.execution.steps[0].program.accept(step)
    assert step.names == ["0/aten.addmm"]
    (program,) = report.compilation.programs
    program.accept(whole)
    assert whole.names == ["0/aten.addmm", "1/aten.addmm"]
    assert len(whole.names) == report.compilation.graph.numComputeSets


def test_events_lie_in_one_another(tmp_path: Path) -> None:
    rows = [(0, 100, "call"), (10, 20, "compile"), (12, 5, "trace"), (40, 10, "run"), (200, 1, "x")]
    events = [{"ph": "X", "cat": "c", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 2}
              for ts, dur, name in rows]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    outer = pva.openTrace(path).process(1).thread(2).events
    assert [event.label for event in outer] == ["call", "x"]
    assert [event.label for event in outer[0].children()] == ["compile", "run"]
    assert outer[0].children()[0].children()[0].duration == pytest.approx(5e-6)
    assert outer[0].channel == "c"
    with pytest.raises(poptorch.Error, match="There is no trace to open"):
        pva.openTrace(tmp_path / "other.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(poptorch.Error, match="There is no trace to open"):
        pva.openTrace(tmp_path / "deep.json")
