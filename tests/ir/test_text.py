"""Programs print like what the user asked for. The texts are the contract."""

import pytest

import poptorch
from helpers.wrapping import options
from helpers.zoo import ROWS, ZOO

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
emit loss, output.* all"""

LANES = """\
repeat 4 iterations
  run step(param.*, buffer.*, batch[i,8 lanes], optstate.*, hyper.*) -> \
param.*, buffer.*, loss, output.*, optstate.*
emit loss, output.* all"""

REPLICAS = """\
repeat 2 iterations
  repeat 3 replicas
    run micro(param.*, batch[i,r], accum.*) -> loss, output.*, accum.* +=
  run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*
emit loss, output.* everyn 2"""

INFERENCE = """\
repeat 2 iterations
  run forward(param.*, buffer.*, batch[i]) -> output.*
emit output.* all"""


def printed(name: str, opts: poptorch.Options, pieces: int, training: bool = True) -> str:
    model = ZOO[name].build()
    if training:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        executor = poptorch.trainingModel(model, opts, optimizer)
    else:
        executor = poptorch.inferenceModel(model.eval(), opts)
    executor.compile(*ZOO[name].inputs(ROWS * pieces))
    text = str(executor.plan().program)
    assert text in str(executor.plan())
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "text"), [(1, LOOPS), (4, CHUNKS), (0, LANES)])
def test_loops_and_lanes(lanes: int, text: str) -> None:
    opts = options(iterations=4, accumulation=8).outputMode(poptorch.OutputMode.All)
    assert printed("conv_batchnorm", opts.lanes(lanes), 32) == text


def test_replicas_are_a_loop_of_their_own_and_inference_has_no_update() -> None:
    opts = options(iterations=2, replicas=3).autoRoundNumIPUs(True)
    opts.outputMode(poptorch.OutputMode.EveryN, 2)
    assert printed("linear", opts.lanes(1), 6) == REPLICAS
    opts = options(iterations=2).lanes(1)
    assert printed("conv_batchnorm", opts, 2, training=False) == INFERENCE
