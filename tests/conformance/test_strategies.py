"""Every strategy computes what the fused program computes, executed part by part on its chips."""

from __future__ import annotations

import pytest
import torch

import poptorch
from helpers.cases import long
from helpers.stage_zoo import ROWS, STAGE_ZOO
from helpers.staging import Captured, assert_same_states
from poptorch import (
    Liveness,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

UPDATES = 2


def strategies(chips: list[int], pipelined: bool) -> dict[str, poptorch.options.Options]:
    """Return the strategies that a list of devices allows."""

    def stages() -> list[Stage]:
        return [Stage(f"b{i}").ipu(chip) for i, chip in enumerate(chips)]

    if pipelined:
        return {
            "grouped": PipelinedExecution(*stages()),
            "interleaved": PipelinedExecution(*stages()).useInterleavedSchedule(),
        }

    def phases() -> list[Phase]:
        return [Phase(one) for one in stages()]

    found = {
        "sharded": ShardedExecution(*stages()),
        "serial": SerialPhasedExecution(*phases()),
        "serial separate": SerialPhasedExecution(*phases()).useSeparateBackwardPhase(),
        **{
            f"serial {liveness.name}": SerialPhasedExecution(*phases()).setTensorsLiveness(liveness)
            for liveness in list(Liveness)[1:]
        },
    }
    if all((chip - i) % 2 == 0 for i, chip in enumerate(chips)):
        found["parallel"] = ParallelPhasedExecution(*phases())
        found["parallel off"] = ParallelPhasedExecution(*phases()).sendTensorsOffChipAfterFwd()
    return found


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def options(accumulation: int) -> poptorch.Options:
    opts = poptorch.Options().autoRoundNumIPUs(True).outputMode(poptorch.OutputMode.All)
    opts.Training.gradientAccumulation(accumulation)
    return opts


@pytest.mark.slow
@pytest.mark.spec("parallel", 25, 28)
@pytest.mark.parametrize(
    "name, blocks",
    [
        ("mlp", 1), ("mlp", 3), ("tied", 2), ("tied", 3), ("skip", 3),
        *(long(name, 3) for name in STAGE_ZOO if name not in ("mlp", "tied", "skip")),
        long("mlp", 4), long("skip", 8),
    ],
)  # fmt: skip
def test_every_strategy_equals_the_fused_program(name: str, blocks: int) -> None:
    example = STAGE_ZOO[name]
    captured = Captured(example.build(blocks), example.inputs(ROWS), sgd)
    for pipelined, accumulation in ((True, 2 * blocks - 1), (False, 2)):
        batches = [example.inputs(ROWS * accumulation) for _ in range(UPDATES)]
        plans = {
            label: captured.plan(options(accumulation).setExecutionStrategy(strategy))
            for label, strategy in strategies(example.chips(blocks), pipelined).items()
        }
        expected, states = captured.run_fused(next(iter(plans.values())), batches)
        for label, plan in plans.items():
            results, ours, _ = captured.run_staged(plan, batches)
            for mine, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(mine, theirs, msg=lambda m, at=label: f"{at}: {m}")
            # Momentum after the first update is the gradient; the rest is after the last.
            for at in (0, -1):
                assert_same_states(ours[at], states[at], plan.program)
