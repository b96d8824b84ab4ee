"""Slots, graphs and the verifier; what programs, plans and schedules print is the contract."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import poptorch
from helpers.source_tree import PACKAGE
from helpers.staging import Captured
from helpers.wrapping import Having, options
from helpers.zoo import ROWS, ZOO
from poptorch._compile.lower import lower
from poptorch._ir import program as ir
from poptorch._ir import slots, verify
from poptorch._ir.bundle import Bundle
from poptorch._ir.graph import Graph, SlotFunction, compose
from poptorch._ir.loops import Lanes, Loops
from poptorch._ir.program import Emit, Program, Run, Scatter, State
from poptorch._ir.slots import Kind
from poptorch._ir.spec import Output, Spec
from poptorch._ir.verify import verify_graph
from poptorch.enums import CommGroupType, OutputMode

PARAM = slots.param("w", (3,), torch.float32)
GRADIENT = slots.gradient(PARAM)
BATCH = slots.batch_input(0, (3,), torch.float32)
OUTPUT = slots.result(0, torch.zeros(3))


def forward() -> Graph:
    def function(t):
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], GRADIENT.key: t[BATCH.key] * 2}

    return lower(SlotFunction("micro", function, (PARAM, BATCH), (OUTPUT, GRADIENT)))


def update() -> Graph:
    def function(t):
        return {PARAM.key: t[PARAM.key] - 0.5 * t[GRADIENT.key]}

    return lower(SlotFunction("update", function, (PARAM, GRADIENT), (PARAM,)))


def test_what_one_part_writes_the_next_reads() -> None:
    step = compose("step", [forward(), update()])
    assert step.inputs == (PARAM, BATCH)
    assert ([s.key for s in step.outputs], step.updates) == ([OUTPUT.key, PARAM.key], {PARAM.key})
    verify_graph(step)
    w, x = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    result = step({PARAM.key: w, BATCH.key: x})
    torch.testing.assert_close(result, {OUTPUT.key: w * x, PARAM.key: w - x})
    kept = compose("step", [forward(), update()], keep=[Kind.GRADIENT])
    assert GRADIENT.key in [s.key for s in kept.outputs]


@pytest.mark.parametrize(("function", "random"), [(torch.rand_like, True), (torch.relu, False)])
def test_random_graphs_say_so(function, random: bool) -> None:
    piece = SlotFunction("p", lambda t: {OUTPUT.key: function(t[BATCH.key])}, (BATCH,), (OUTPUT,))
    assert lower(piece).random is random


def test_text_names_slots_and_operators() -> None:
    assert str(update()) == (
        "graph update\n"
        "  in  param.w: float32[3]\n"
        "  in  gradient.w: float32[3]\n"
        "  mul = mul.Tensor(gradient.w, 0.5)\n"
        "  sub = sub.Tensor(param.w, mul)\n"
        "  out param.w: float32[3] = sub"
    )


def test_inputs_whose_keys_differ_in_punctuation_only_stay_apart() -> None:
    params = [slots.param(path, (), torch.float32) for path in ("a.b", "a_b", "a/b", "~a.b")]
    fxgraph = fx.Graph()
    fxgraph.output(tuple(reversed([fxgraph.placeholder(f"x{i}") for i in range(len(params))])))
    outputs = tuple(slots.result(i, torch.zeros(())) for i in range(len(params)))
    joined = compose("joined", [Graph("part", fx.GraphModule({}, fxgraph), (*params,), outputs)])
    values = {slot.key: torch.tensor(float(i)) for i, slot in enumerate(params)}
    assert [float(v) for v in joined(values).values()] == [3.0, 2.0, 1.0, 0.0]


EMIT = Emit((OUTPUT,), OutputMode.Final)


def graph() -> Graph:
    def function(t):
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], PARAM.key: t[PARAM.key] + 1}

    return lower(SlotFunction("step", function, (PARAM, BATCH), (OUTPUT, PARAM)))


def program(*body) -> Program:
    return Program(body or (Run("step"), EMIT), {"step": graph()}, Loops(), {})


def expect(rule: str):
    return pytest.raises(AssertionError, match=f"rule {rule} broken: .*{verify.RULES[rule][:20]}")


def test_a_sound_program_passes_and_every_rule_is_tested_here() -> None:
    verify.verify_program(program())
    verify.verify_spec(Spec())
    verify.verify_state(State({PARAM.key: torch.zeros(3)}), program())
    assert [r for r in verify.RULES if f'"{r}"' not in Path(__file__).read_text()] == []


def writing() -> Graph:
    fxgraph = fx.Graph()
    x = fxgraph.placeholder("x")
    fxgraph.output((fxgraph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    return Graph("g", fx.GraphModule({}, fxgraph), (BATCH,), (OUTPUT,))


def narrowing() -> Graph:
    piece = SlotFunction("p", lambda t: {PARAM.key: t[PARAM.key].half()}, (PARAM,), (PARAM,))
    narrow = dataclasses.replace(PARAM, dtype=torch.float16)
    return dataclasses.replace(lower(piece), outputs=(narrow,))


@pytest.mark.parametrize("rule, broken", [
    ("G1", lambda: dataclasses.replace(graph(), inputs=(PARAM,))),
    ("G2", lambda: dataclasses.replace(graph(), outputs=(OUTPUT, OUTPUT))),
    ("G3", writing),
    ("G4", lambda: dataclasses.replace(
        graph(), inputs=(PARAM, dataclasses.replace(BATCH, shape=(4,))))),
    ("G5", narrowing),
    ("G6", lambda: dataclasses.replace(graph(), inputs=(OUTPUT, BATCH))),
])  # fmt: skip
def test_graph_rules(rule: str, broken) -> None:
    with expect(rule):
        verify.verify_graph(broken())


@pytest.mark.parametrize("rule, body", [
    ("P1", (Run("step"), EMIT, EMIT)), ("P2", (Run("other"), EMIT)),
    ("P3", (ir.Repeat(ir.Axis.ITERATIONS, 0, (Run("step"),)), EMIT)),
    ("P3", (Run("step"), ir.Reduce("accum", "median", 2), EMIT)),
    ("P3", (Run("step"), Scatter("median", 1, ((PARAM, PARAM),)), EMIT)),
    ("P5", (Run("step"), Emit((BATCH,), OutputMode.Final))),
    ("P6", (Run("step"), Scatter("sum", 2, ((PARAM, PARAM),)), EMIT)),
    ("P6", (Run("step"), ir.Gather(2, (ir.Shard(Bundle(PARAM, ()), PARAM),)), EMIT)),
])  # fmt: skip
def test_program_rules(rule: str, body) -> None:
    with expect(rule):
        verify.verify_program(program(*body))


def test_reads_are_state_or_batch() -> None:
    gradient = slots.gradient(PARAM)
    piece = SlotFunction("step", lambda t: {OUTPUT.key: -t[gradient.key]}, (gradient,), (OUTPUT,))
    with expect("P4"):
        verify.verify_program(Program((Run("step"), EMIT), {"step": lower(piece)}, Loops(), {}))


@pytest.mark.parametrize("rule, spec", [
    ("S1", Spec(loops=Loops(iterations=0))),
    ("S1", Spec(output=Output(OutputMode.Default))),
    ("S2", Spec(loops=Loops(replicas=3, input_group_size=2))),
    ("S2", Spec(loops=Loops(iterations=4), output=Output(OutputMode.EveryN, 3))),
])  # fmt: skip
def test_spec_rules(rule: str, spec: Spec) -> None:
    with expect(rule):
        verify.verify_spec(spec)


@pytest.mark.parametrize("tensor", [None, torch.zeros(4), torch.zeros(3, dtype=torch.int32)])
def test_state_matches_its_program(tensor) -> None:
    tensors = {} if tensor is None else {PARAM.key: tensor}
    with expect("T1"):
        verify.verify_state(State(tensors), program())


WEIGHT = slots.param("fc.weight", (3, 2), torch.float16)


@pytest.mark.parametrize("slot, key, weight", [
    (WEIGHT, "param.fc.weight", "fc.weight"),
    (slots.buffer("bn.mean", (3,), torch.float32), "buffer.bn.mean", ""),
    (slots.gradient(WEIGHT), "gradient.fc.weight", "fc.weight"),
    (slots.accumulator(WEIGHT, torch.float32), "accum.fc.weight", "fc.weight"),
    (slots.moment("velocity", WEIGHT, torch.float32),
     "optstate.velocity.fc.weight",
     "fc.weight"),
    (slots.hyper("lr", 1), "hyper.1.lr", ""),
    (slots.hyper("beta1", 0), "hyper.0.one_minus_beta1", ""),
    (slots.LOSS_SCALING, "hyper.loss_scaling", ""),
    (slots.STEP, "optstate.step", ""),
    (slots.batch_input(2, (4,), torch.int32), "batch.2", None),
    (slots.result(0, torch.zeros(()), is_loss=True), "loss.0", None),
    (slots.result(1, torch.zeros(())), "output.1", None),
])  # fmt: skip
def test_a_slot_has_a_key_and_knows_its_weight_and_a_moment_that_of_another(slot, key, weight):
    assert slot.key == key
    assert weight in (None, slot.weight)
    moment = slots.moment("velocity", WEIGHT, torch.float32)
    assert (moment.name, moment.shape) == ("velocity", (3, 2))
    other = slots.param("velocity.fc.weight", (5,), torch.float16)
    assert moment.of(other) == slots.moment("velocity", other, torch.float32)


ROOMS = (
    "_ir", "_capture", "_update", "_place", "_schedule", "_compile", "backends", "optim",
    "_ipu_model", "_session",
)  # fmt: skip
CALLS = r"\.(r?partition|r?split|remove(pre|suf)fix|startswith|endswith|r?find|index)\("
SPLITTING = re.compile(
    rf"\b(key|path){CALLS}|\bint\([\w.]*\b(key|path)\)"
    rf"|{CALLS}f?['\"]?\{{?(Kind\b|({'|'.join(Kind)})\.)"
)


def test_no_key_is_split() -> None:
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    lines = [(path.name, line) for path in files for line in path.read_text().splitlines()]
    assert [(name, line) for name, line in lines if SPLITTING.search(line)] == []
    assert all(map(SPLITTING.search, (
        "slot.path.partition('.')", "key.startswith(f'{Kind.ACCUM}.')",
        "name.startswith('optstate.')", "int(slot.path)",
    )))  # fmt: skip


@st.composite
def counts(draw):
    replicas = draw(st.integers(1, 6))
    group = draw(st.sampled_from([g for g in range(1, replicas + 1) if replicas % g == 0]))
    kind = draw(st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]))
    return Loops(draw(st.integers(1, 3)), draw(st.integers(1, 4)), replicas, group, kind)


def test_the_combined_batch_is_a_product():
    loops = Loops(iterations=2, accumulation=5, replicas=3)
    assert (loops.steps, loops.slices, loops.micro_batches) == (10, 30, 30)
    assert str(loops) == "2 device iterations x 3 replicas x 5 accumulation steps"
    grouped = Loops(2, 5, 6, input_group_size=2)
    assert (grouped.slices, grouped.micro_batches) == (30, 60)
    assert str(grouped) == "2 device iterations x 3 input groups x 5 accumulation steps"
    value = torch.tensor(3)
    assert Loops().cut([value]) == [(value,)]


@settings(max_examples=60, deadline=None)
@given(counts(), st.integers(1, 3))
def test_slices_lie_in_the_order_of_the_batch(loops: Loops, rows: int):
    value = torch.arange(loops.slices * rows * 2).view(-1, 2)
    whole = value.view(loops.iterations, loops.accumulation, loops.input_groups, rows, 2)
    (slices,) = loops.cut([value])
    numbers = []
    for iteration in range(loops.iterations):
        for accumulated in range(loops.accumulation):
            step = loops.step(iteration, accumulated)
            assert loops.iteration(step) == iteration
            for replica in range(loops.replicas):
                wanted = whole[iteration, accumulated, loops.input_group(replica)]
                assert torch.equal(slices[loops.slice_of(step, replica)], wanted)
                numbers.append(loops.micro_batch(step, replica))
    assert numbers == [*range(loops.micro_batches)]


@settings(max_examples=60, deadline=None)
@given(counts(), st.data())
def test_lanes_read_what_single_runs_would(loops: Loops, data):
    steps = data.draw(
        st.sampled_from([n for n in range(1, loops.steps + 1) if loops.steps % n == 0])
    )
    lanes, value = Lanes(steps, loops.replicas), torch.arange(loops.slices * 2).view(-1, 1)
    (singly,) = loops.cut([value])
    (runs,) = loops.cut([value], lanes)
    assert len(runs) * lanes.count == loops.micro_batches
    for step in range(loops.steps):
        for replica in range(loops.replicas):
            lane = (step % steps) * loops.replicas + replica
            assert torch.equal(runs[step // steps][lane], singly[loops.slice_of(step, replica)])


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
    captured, opts = Captured(two(), (torch.randn(2, 4),)), poptorch.Options().deviceIterations(3)
    opts.Distributed.configureProcessId(1, 2).stageProcesses(2)
    lines = str(captured.plan(opts)).splitlines()
    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["stage"])
    rows = [line.split() for line in lines[head : head + 3]]
    assert [row[rows[0].index("process")] for row in rows] == ["process", "0", "1"]
    assert any("3 micro-batches in 4 columns, bubble 25%; 2 processes wait 26%" in s for s in lines)
    trained = Captured(two(), (torch.randn(2, 4),), lambda m: torch.optim.SGD(m.parameters(), 0.1))
    opts.setExecutionStrategy(poptorch.PipelinedExecution().useInterleavedSchedule())
    opts.Training.gradientAccumulation(4)  # one more forward than on one
    assert "chip 0: 0F0 0F1 0F2 0B0 0F3 0B1 .   0B2 .   0B3" in str(trained.plan(opts))
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
    assert printed("conv_batchnorm", options(iterations=2).lanes(1), 2, training=False) == INFERENCE
