"""How visits become stages: merging, order, phases with exchange, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.placing import X, chain, options, passes, place, stages
from poptorch import (
    AutoStage,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch._ir.blocks import label_of


@pytest.mark.spec("parallel", 16)
def test_neighbours_on_one_device_are_one_stage() -> None:
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    layout = chain(("A", 0), ("B", 0), ("C", 1), ("D", 1), strategy=strategy)
    assert stages(layout) == [(0, ("A", "B")), (1, ("C", "D"))]
    assert layout.depth == 2


def test_stage_ids_must_ascend_along_the_data_flow() -> None:
    steps = ("0", 0), ("1", 1), ("2", 0)
    with pytest.raises(poptorch.Error, match="ids must ascend along the data flow") as caught:
        chain(*steps)
    assert "block 2 (stage 0) reads a result of block 1 (stage 1)" in str(caught.value)
    layout = chain(*steps, strategy=PipelinedExecution(AutoStage.AutoIncrement))
    assert stages(layout) == [(0, ("0",)), (1, ("1",)), (0, ("2",))]
    layout = chain(*steps, strategy=PipelinedExecution("0", "1", "2"))
    assert stages(layout) == [(0, ("0",)), (1, ("1",)), (0, ("2",))]
    with pytest.raises(poptorch.Error, match="ids must ascend"):
        chain(*steps, strategy=PipelinedExecution("2", "1", "0"))


@pytest.mark.spec("parallel", 20)
def test_sharded_stages_are_stretches_of_execution() -> None:
    layout = chain(("0", 0), ("1", 1), ("2", 0), ("3", 0), strategy=ShardedExecution())
    assert stages(layout) == [(0, ("0",)), (1, ("1",)), (0, ("2", "3"))]
    assert isinstance(ShardedExecution(), PipelinedExecution)


def test_a_pipeline_stage_is_on_one_device() -> None:
    with pytest.raises(poptorch.Error, match="pipeline stage runs on one IPU"):
        chain(("A", 0), ("B", 1), strategy=PipelinedExecution(Stage("A", "B")))


@pytest.mark.spec("parallel", 26, 27)
def test_phases_hold_one_stage_or_several() -> None:
    steps = ("A", None), ("B", None), ("C", None), ("D", None)
    strategy = SerialPhasedExecution([Phase(Stage("A"), Stage("B")), Phase("C", "D")])
    strategy.phase(0).ipus(0, 2)
    layout = chain(*steps, strategy=strategy)
    assert [(s.phase, s.chip, s.blocks) for s in layout.stages] == [
        (0, 0, ("A",)), (0, 2, ("B",)), (1, 0, ("C", "D")),
    ]  # fmt: skip


def test_phases_must_follow_the_data() -> None:
    with pytest.raises(poptorch.Error, match="Phase ids must ascend along the data flow"):
        chain(("A", 0), ("B", 0), strategy=SerialPhasedExecution("B", "A"))


class TwoHalves(nn.Module):
    """Six phases on two devices at a time, which exchange halves between and within phases."""

    N = 3

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(4, 4)) for _ in range(6 * self.N))

    def forward(self, x, target=None):
        phase, weight = 0, iter(self.weights)
        with poptorch.Block("phase0_ipu0"):
            halves = torch.split(x, 4)
        for layer in range(3 * self.N):
            out = []
            for ipu in range(2):
                with poptorch.Block(f"phase{phase}_ipu{ipu}"):
                    out.append(torch.relu(torch.matmul(next(weight), halves[ipu])))
            halves = out[1], out[0]
            if layer % 3 != 1:  # two products in every odd phase
                phase += 1
        with poptorch.Block(f"phase{2 * self.N - 1}_ipu1"):
            result = halves[0] + halves[1]
            if target is None:
                return result
            return result, nn.functional.l1_loss(result, target)


def two_halves_strategy() -> ParallelPhasedExecution:
    phases = []
    for n in range(TwoHalves.N):
        even, odd = f"phase{2 * n}", f"phase{2 * n + 1}"
        phases.append([Stage(f"{even}_ipu0").ipu(0), Stage(f"{even}_ipu1").ipu(2)])
        phases.append([Stage(f"{odd}_ipu0").ipu(1), Stage(f"{odd}_ipu1").ipu(3)])
    return ParallelPhasedExecution(*phases)


@pytest.mark.spec("parallel", 15)
@pytest.mark.parametrize("training", [False, True])
def test_devices_of_a_phase_exchange_data_in_rounds(training: bool) -> None:
    inputs = (torch.rand(8, 1), torch.rand(4, 1)) if training else (torch.rand(8, 1),)
    opts = options(two_halves_strategy(), training=training)
    layout = place(TwoHalves(), *inputs, opts=opts, training=training)
    assert layout.chips == 4
    assert [stage.phase for stage in layout.stages] == sorted(s.phase for s in layout.stages)
    assert len(layout.stages) == 2 + 2 * 2 + 2 + 2 * 2 + 2 + 2 * 2 + 1
    placed = passes(layout)
    assert all(
        placed[i] <= where
        for node, where in placed.items()
        for i in node.all_input_nodes
        if i in placed
    )


@pytest.mark.spec("parallel", 1)
def test_an_operator_in_no_block_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x):
            with poptorch.Block("A", ipu_id=0):
                x = x * 2
            return x + 1

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong") as caught:
        place(Model(), X, opts=options(training=False), training=False)
    assert "test_stages.py" in str(caught.value)
    assert "return x + 1" in str(caught.value)


@pytest.mark.spec("parallel", 44)
def test_the_loss_belongs_to_the_last_block_and_gradients_to_their_forward_stage() -> None:
    layout = chain(("A", 0), ("B", 1), ("C", 2))
    placed = passes(layout)
    assert [str(where) for node, where in placed.items() if node.name == "mean"] == ["2F"]
    for node, where in placed.items():
        label = label_of(node)
        assert where.backward == label.backward
        if label.visit is not None:
            assert where.stage == label.visit - 1
    assert {where.stage for where in placed.values() if where.backward} == {0, 1, 2}


@pytest.mark.spec("parallel", 48)
def test_annotating_again_gives_the_same_placement() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    found = []
    for _ in range(2):
        poptorch.BeginBlock(model[1], "B", ipu_id=1)
        layout = place(model, X, opts=options(training=False), training=False)
        found.append((stages(layout), [where.stage for where in passes(layout).values()]))
        poptorch.removeBlocks(model)
    assert found[0] == found[1]
