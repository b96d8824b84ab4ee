"""What programs, plans and schedules print. The texts are the contract."""

import pytest
import torch

import poptorch
from helpers.staging import Captured
from helpers.wrapping import Having, options
from helpers.zoo import ROWS, ZOO

PIPELINED = """\
runs on the reference backend
repeat 3 micro-batches
  run micro(param.*, batch[a], accum.*) -> loss, accum.* +=
run update(param.*, accum.*, hyper.*) -> param.*, accum.*
emit loss final
pipelined, grouped training: 2 stages on 2 IPUs, 1 replica, 2 IPUs reserved
  stage  ipu  blocks   operators  weights  kept per micro-batch
  0      0    (start)  3 + 7      80 B     32 B
  1      1    B        4 + 12     80 B     68 B
homes
  weights: on chip
  activations: on chip
  optimizer state: on chip
  accumulators: on chip
sent between chips
  after  from   to     tensors  bytes  per
  0F     ipu 0  ipu 1  1        32 B   micro-batch
  1B     ipu 1  ipu 0  1        32 B   micro-batch
schedule of one update: 3 micro-batches in 9 columns, bubble 22%
  chip 0: 0F0 0F1 .   0F2 0B0 .   0B1 0B2 0U0
  chip 1: .   1F0 1B0 1F1 1B1 1F2 1B2 .   1U0
  1F0: forward of stage 1, micro-batch 0; 1B0: backward; 0U1: update of chip 0, round 1"""


def two() -> Having:
    def forward(model, x):
        x = model.first(x).tanh()
        poptorch.Block.start("B", 1)
        return poptorch.identity_loss(model.second(x).tanh(), "mean")

    return Having(forward, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))


def training(lanes: int, strategy=None) -> poptorch.PoplarExecutor:
    opts, model = options(accumulation=3).lanes(lanes), two()
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    executor.compile(torch.randn(6, 4))
    return executor


@pytest.mark.slow
def test_a_pipelined_plan_has_the_same_stages_side_by_side() -> None:
    assert str(training(lanes=1).plan()) == PIPELINED
    plan = training(lanes=3).plan()
    assert plan.program.lanes is not None
    assert str(plan).endswith(PIPELINED[PIPELINED.index("pipelined") :])


def test_a_phased_plan_tells_what_is_loaded() -> None:
    text = str(training(1, poptorch.SerialPhasedExecution("A", "B")).plan())
    assert "serial phased training: 2 stages on 2 IPUs" in text
    assert "stage  ipu  phase  blocks" in text
    assert "weights: in streaming memory" in text
    assert "loaded: " in text
    assert "  chip 0: L0F0 0F0" in text
    assert text.endswith("; L, S: load from, store to streaming memory")


def test_homes_are_told() -> None:
    opts = options(replicas=2)
    settings = poptorch.TensorLocationSettings().useOnChipStorage(False).useIOTilesToLoad(True)
    opts.TensorLocations.setWeightLocation(settings.useReplicatedTensorSharding(True))
    opts.TensorLocations.numIOTiles(32)
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
    model.compile(torch.randn(2, 2))
    text = str(model.plan())
    assert "weights: in streaming memory, sharded over replicas, loaded by I/O tiles" in text
    assert "I/O tiles: 32" in text


def test_processes_that_share_the_stages_are_told() -> None:
    captured = Captured(two(), (torch.randn(2, 4),))
    opts = poptorch.Options().deviceIterations(3)
    opts.Distributed.configureProcessId(1, 2).stageProcesses(2)
    lines = str(captured.plan(opts)).splitlines()
    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["stage"])
    names = lines[head].split()
    rows = [line.split() for line in lines[head + 1 : head + 3]]
    assert [row[names.index("process")] for row in rows] == ["0", "1"]
    opts = opts.clone()
    opts.Distributed.configureProcessId(1, 3).stageProcesses(3)
    with pytest.raises(poptorch.Error, match="more processes than chips"):
        captured.plan(opts)


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
