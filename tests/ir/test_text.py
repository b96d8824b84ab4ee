"""Programs print like what the user asked for. The texts are the contract."""

from __future__ import annotations

import pytest

import poptorch
from helpers.zoo import ROWS, ZOO

ONE = """\
run step(param.*, batch.*, optstate.*, hyper.*) -> param.*, loss, output.*, optstate.*
emit loss, output.* final"""

LOOPS = """\
repeat 4 iterations
  repeat 8 micro-batches
    run micro(param.*, buffer.*, batch[i,a], accum.*) -> buffer.*, loss, output.*, accum.* +=
  run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*
emit loss, output.* all"""

CHUNKS = """\
repeat 4 iterations
  repeat 2 chunks of 4 lanes  # 8 micro-batches
    run micro(param.*, buffer.*, batch[i,c,4 lanes], accum.*) -> \
buffer.*, loss, output.*, accum.* +=
  run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*
emit loss, output.* final"""

LANES = """\
repeat 4 iterations
  run step(param.*, buffer.*, batch[i,8 lanes], optstate.*, hyper.*) -> \
param.*, buffer.*, loss, output.*, optstate.*
emit loss, output.* final"""

REPLICAS = """\
repeat 2 iterations
  repeat 3 replicas
    run micro(param.*, batch[i,r], accum.*) -> loss, output.*, accum.* +=
  run update(param.*, accum.*, hyper.*) -> param.*, accum.*
emit loss, output.* everyn 2"""

INFERENCE = """\
repeat 2 iterations
  run forward(param.*, buffer.*, batch[i]) -> output.*
emit output.* all"""


def printed(executor: poptorch.PoplarExecutor, name: str, pieces: int) -> str:
    x, y = ZOO[name].inputs(ROWS * pieces)
    executor.compile(x, y)
    return str(executor.plan().program)


def options() -> poptorch.Options:
    return poptorch.Options().backend("reference").showCompilationProgressBar(False)


def training(name: str, opts: poptorch.Options, **settings: float) -> poptorch.PoplarExecutor:
    model = ZOO[name].build()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, **settings)
    return poptorch.trainingModel(model, opts, optimizer)


def test_one_micro_batch_per_update_is_one_graph() -> None:
    executor = training("linear", options(), momentum=0.9)
    assert printed(executor, "linear", 1) == ONE


def test_loops() -> None:
    opts = options().deviceIterations(4).outputMode(poptorch.OutputMode.All)
    opts.Training.gradientAccumulation(8)
    executor = training("conv_batchnorm", opts.lanes(1), momentum=0.9)
    assert printed(executor, "conv_batchnorm", 32) == LOOPS


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "text"), [(4, CHUNKS), (8, LANES), (0, LANES)])
def test_lanes(lanes: int, text: str) -> None:
    opts = options().deviceIterations(4).lanes(lanes)
    opts.Training.gradientAccumulation(8)
    executor = training("conv_batchnorm", opts, momentum=0.9)
    assert printed(executor, "conv_batchnorm", 32) == text


def test_replicas_are_a_loop_of_their_own() -> None:
    opts = options().deviceIterations(2).replicationFactor(3).autoRoundNumIPUs(True)
    opts.outputMode(poptorch.OutputMode.EveryN, 2)
    assert printed(training("linear", opts.lanes(1)), "linear", 6) == REPLICAS


def test_inference() -> None:
    model = ZOO["conv_batchnorm"].build().eval()

    class OutputOnly(type(model)):
        def forward(self, x, y):
            return super().forward(x, y)[0]

    model.__class__ = OutputOnly
    executor = poptorch.inferenceModel(model, options().deviceIterations(2).lanes(1))
    assert printed(executor, "conv_batchnorm", 2) == INFERENCE


@pytest.mark.parametrize("name", ["linear"])
def test_a_plan_prints_its_program(name: str) -> None:
    executor = training(name, options())
    executor.compile(*ZOO[name].inputs(ROWS))
    assert str(executor.plan().program) in str(executor.plan())
