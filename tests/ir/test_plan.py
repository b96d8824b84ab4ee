"""What plans and programs print is their contract."""

from typing import Any

import pytest
import torch

import poptorch
from helpers.staging import Captured, sgd
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


def two_blocks() -> Having:
    """A layer on each of two chips."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        x = model.first(x).tanh()
        poptorch.Block.start("B", 1)
        return poptorch.identity_loss(model.second(x).tanh(), "mean")

    return Having(forward, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))


def plan_of_training(lanes: int, strategy: Any = None) -> Any:
    """The plan of training the two layers on three micro-batches of two rows."""
    opts = options(accumulation=3).lanes(lanes)
    model = two_blocks()
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    executor.compile(torch.randn(6, 4))
    return executor.plan()


@pytest.mark.slow
def test_a_pipelined_plan_shows_stages_homes_transfers_and_the_schedule() -> None:
    assert str(plan_of_training(lanes=1)) == PIPELINED


@pytest.mark.slow
def test_a_pipelined_plan_has_the_same_stages_side_by_side() -> None:
    stages_and_schedule = PIPELINED[PIPELINED.index("pipelined") :]

    plan = plan_of_training(lanes=3)

    assert plan.program.lanes is not None
    assert str(plan).endswith(stages_and_schedule)


def test_a_phased_plan_shows_phases_and_loads() -> None:
    text = str(plan_of_training(1, poptorch.SerialPhasedExecution("A", "B")))

    assert "serial phased training: 2 stages on 2 IPUs" in text
    assert "stage  ipu  phase  blocks" in text
    assert "weights: in streaming memory" in text
    assert "loaded: " in text
    assert "  chip 0: L0F0 0F0" in text
    assert text.endswith("; L, S: load from, store to streaming memory")


def test_a_plan_shows_where_weights_are_kept() -> None:
    opts = options(replicas=2)
    settings = poptorch.TensorLocationSettings().useOnChipStorage(False).useIOTilesToLoad(True)
    opts.TensorLocations.setWeightLocation(settings.useReplicatedTensorSharding(True))
    opts.TensorLocations.numIOTiles(32)
    model = poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
    model.compile(torch.randn(2, 2))

    text = str(model.plan())

    assert "weights: in streaming memory, sharded over replicas, loaded by I/O tiles" in text
    assert "I/O tiles: 32" in text


# Processes that share the stages.


def sharing_stages(processes: int) -> poptorch.Options:
    """Options of one of several processes, each of which runs some of the stages."""
    opts = poptorch.Options().deviceIterations(3)
    opts.Distributed.configureProcessId(1, processes).stageProcesses(processes)
    return opts


def inferring() -> Captured:
    return Captured(two_blocks(), (torch.randn(2, 4),))


def test_a_plan_shows_which_process_runs_a_stage() -> None:
    lines = str(inferring().plan(sharing_stages(2))).splitlines()

    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["stage"])
    titles, first, second = (line.split() for line in lines[head : head + 3])
    column = titles.index("process")
    assert first[column] == "0"
    assert second[column] == "1"


def test_a_plan_shows_how_long_processes_wait() -> None:
    text = str(inferring().plan(sharing_stages(2)))

    assert "3 micro-batches in 4 columns, bubble 25%; 2 processes wait 26%" in text


def test_an_interleaved_schedule_of_processes_has_one_more_forward_pass_ahead() -> None:
    opts = sharing_stages(2)
    opts.setExecutionStrategy(poptorch.PipelinedExecution().useInterleavedSchedule())
    opts.Training.gradientAccumulation(4)
    trained = Captured(two_blocks(), (torch.randn(2, 4),), sgd)

    assert "chip 0: 0F0 0F1 0F2 0B0 0F3 0B1 .   0B2 .   0B3" in str(trained.plan(opts))


def test_more_processes_than_stages_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="more processes per model than chips"):
        inferring().plan(sharing_stages(3))


# Programs.

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
    """The program of a model of the zoo, on a batch of this number of micro-batches."""
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
@pytest.mark.parametrize(
    ("lanes", "text"),
    [(1, LOOPS), (4, CHUNKS), (0, LANES)],
    ids=["one by one", "four lanes", "all in lanes"],
)
def test_a_program_of_training_shows_loops_and_lanes(lanes: int, text: str) -> None:
    opts = options(iterations=4, accumulation=8).outputMode(poptorch.OutputMode.All)

    assert printed("conv_batchnorm", opts.lanes(lanes), 32) == text


def test_a_program_shows_replicas_as_a_loop() -> None:
    opts = options(iterations=2, replicas=3).autoRoundNumIPUs(True)
    opts.outputMode(poptorch.OutputMode.EveryN, 2)

    assert printed("linear", opts.lanes(1), 6) == REPLICAS


def test_a_program_of_inference_has_no_update() -> None:
    opts = options(iterations=2).lanes(1)

    assert printed("conv_batchnorm", opts, 2, training=False) == INFERENCE
