"""Which stage and device a block gets, by the strategy; what is refused; parts of what is cut."""

import copy
import functools
import itertools
import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import poptorch
from helpers.captures import Chain, X, capture, chain, homes, options, passes, place, stages
from helpers.staging import ROWS, STAGE_ZOO, Captured, sgd
from helpers.workloads import backward, forward
from helpers.wrapping import Having
from helpers.wrapping import options as quick
from poptorch import Phase, PipelinedExecution, SerialPhasedExecution, ShardedExecution, Stage
from poptorch._ipu_model.scaling import Link
from poptorch._ir import verify
from poptorch._ir.blocks import Direction, StagePass, label_of, stage_passes
from poptorch._ir.graph import Graph
from poptorch._ir.plan import Staged, values_read, values_written
from poptorch._ir.slots import Kind
from poptorch._place import early
from poptorch._place.balance import Unit, balance
from poptorch._place.place import phase_number
from poptorch.options.freeze import freeze

ParallelPhasedExecution = poptorch.ParallelPhasedExecution
AUTO = functools.partial(PipelinedExecution, poptorch.AutoStage.AutoIncrement)
FOUR = (("A", 0), ("B", 1), ("C", 2), ("D", 3))
RETURN = (("0", 0), ("1", 1), ("2", 0))
BACK = [(0, ("0",)), (1, ("1",)), (0, ("2",))]


def two_in_a_phase() -> SerialPhasedExecution:
    strategy = SerialPhasedExecution([Phase(Stage("A"), Stage("B")), Phase("C", "D")])
    strategy.phase(0).ipus(0, 2)
    return strategy


def in_turn() -> ParallelPhasedExecution:
    strategy = ParallelPhasedExecution(*(Phase(Stage(a), Stage(b)) for a, b in ("AB", "CD")))
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    return strategy


def odd_on_even() -> ParallelPhasedExecution:
    strategy = ParallelPhasedExecution(Phase("A"), Phase("B"))
    strategy.phase(1).ipus(2)
    return strategy


# Blocks and their devices, a strategy; the devices of stages with their blocks, and the depth.
PLACED = [
    ((None, ("A", 1), None), lambda: None, [(0, ()), (1, ("A",))], 2),
    ((("A", 0), ("B", 0)), lambda: None, [(0, ("A", "B"))], 1),
    ((None, None), lambda: None, [(0, ())], 1),
    (FOUR, lambda: None, [(0, ("A",)), (1, ("B",)), (2, ("C",)), (3, ("D",))], 4),
    ((None, ("A", 0), ("B", 1), ("C", 0)), AUTO, [(0, ("A",)), (1, ("B",)), (0, ("C",))], 3),
    ((("A", None), ("B", None)), AUTO, [(0, ("A",)), (1, ("B",))], 2),
    ((("A", 1),), AUTO, [(1, ("A",))], 2),  # it starts from device 0
    (RETURN, AUTO, BACK, 3),
    (RETURN, lambda: PipelinedExecution("0", "1", "2"), BACK, 3),
    # A stage decides before the block, and the block before the number.
    ((("A", 0), ("B", 5), ("C", None)),
     lambda: PipelinedExecution(Stage("A").ipu(3), "B", ["C"], Stage("unused")),
     [(3, ("A",)), (5, ("B",)), (2, ("C",))], None),
    ((("A", 0), ("B", 0)), lambda: PipelinedExecution(Stage("A", "B")), [(0, ("A", "B"))], 1),
    # Any printable id is compared as text.
    (((0, None),), lambda: PipelinedExecution(Stage("0")), [(0, ("0",))], 1),
    ((("A", None), ("B", None), ("A", None), ("C", 1)), ShardedExecution,
     [(0, ("A",)), (1, ("B",)), (0, ("A",)), (1, ("C",))], None),
    ((*RETURN, ("3", 0)), ShardedExecution, [(0, ("0",)), (1, ("1",)), (0, ("2", "3"))], None),
    ((("A", 0), ("B", 1)), lambda: ParallelPhasedExecution(Phase("A"), Phase("B")),
     [(0, ("A",)), (1, ("B",))], None),
    ((("A", 0), ("B", 0)), lambda: SerialPhasedExecution(Phase("A"), Phase("B")),
     [(0, ("A",)), (0, ("B",))], None),
    (tuple((name, None) for name in "ABCD"), in_turn,
     [(0, ("A",)), (2, ("B",)), (1, ("C",)), (3, ("D",))], None),
    (tuple((name, None) for name in "ABCD"), two_in_a_phase,
     [(0, ("A",)), (2, ("B",)), (0, ("C", "D"))], None),
]  # fmt: skip


@pytest.mark.spec("parallel", 3, 4, 9, 11, 12, 13, 14, 16, 19, 20, 24, 26, 27)
@pytest.mark.parametrize("steps, strategy, expected, depth", PLACED)
def test_blocks_get_stages_and_devices(steps, strategy, expected, depth: int | None) -> None:
    layout = chain(*steps, strategy=strategy())
    assert stages(layout) == expected
    assert depth in (None, layout.depth)
    if strategy is two_in_a_phase:
        assert [stage.phase for stage in layout.stages] == [0, 0, 1]


SHARED = Stage("A", "B")
# What is refused, and the class and the words of the error.
REFUSED = [
    ((("A", 0), ("B", None)), lambda: None, AssertionError, r"AutoStage\.SameAsIpu .* for block B"),
    ((("A", 0), ("C", 0)), lambda: PipelinedExecution(SHARED), AssertionError,
     "Unknown Block C.*known blocks: A, B"),
    ((("A", 0), ("B", 1)), lambda: PipelinedExecution(SHARED), poptorch.Error,
     "pipeline stage runs on one IPU"),
    ((("A", 0), ("B", 0)), lambda: ParallelPhasedExecution(Phase("A"), Phase("B")), poptorch.Error,
     "even phases must run on even IPUs"),
    ((("A", 0), ("B", 1)), odd_on_even, poptorch.Error, "even phases must run on even IPUs"),
    ((("A", -1),), lambda: None, poptorch.Error, "cannot be negative"),
    (RETURN, lambda: None, poptorch.Error, r"ids must ascend along the data flow"
     r".*block 2 \(stage 0\) reads a result of block 1 \(stage 1\)"),
    ((("A", 0), ("B", 0)), lambda: SerialPhasedExecution("B", "A"), poptorch.Error,
     "Phase ids must ascend along the data flow"),
    ((None, ("A", 64)), lambda: None, poptorch.Error,
     r"Too many IPUs requested \(65\).*require distributed execution"),
]  # fmt: skip


@pytest.mark.spec("parallel", 10, 13, 23, 24, 43)
@pytest.mark.parametrize("steps, strategy, error, phrase", REFUSED)
def test_what_cannot_be_placed_is_refused(steps, strategy, error, phrase: str) -> None:
    with pytest.raises(error, match=f"(?s){phrase}") as caught:
        chain(*steps, strategy=strategy())
    assert isinstance(caught.value, poptorch.Error)


@pytest.mark.spec("parallel", 17, 18)
@pytest.mark.parametrize("training, count, phrase", [
    (True, 7, r"gradientAccumulation must be greater than or equal.*\(7\)"
              ".*there are 3 additional stages"),
    (False, 4, r"deviceIterations must be greater .* \(4\)"),
])  # fmt: skip
def test_each_stage_needs_a_micro_batch(training: bool, count: int, phrase: str) -> None:
    def placed(number: int, strategy=None):
        counts = {"accumulation": number} if training else {"iterations": number}
        return chain(*FOUR, training=training, strategy=strategy, **counts)

    assert placed(count).depth == 4
    with pytest.raises(poptorch.Error, match=f"(?s){phrase}"):
        placed(count - 1)
    placed(1, ShardedExecution())
    placed(1, SerialPhasedExecution("A", "B", "C", "D"))


@pytest.mark.spec("parallel", 21, 22, 23)
def test_devices_are_counted_and_rounded(caplog: pytest.LogCaptureFixture) -> None:
    def counted(opts: poptorch.Options, steps=FOUR[:3]) -> tuple[int, int]:
        layout = place(Chain(*steps), X, opts=opts)
        return layout.chips, layout.reserved

    assert counted(options(), [("A", 3)]) == (4, 4)  # up to the highest
    assert counted(options().replicationFactor(3), FOUR[:2]) == (2, 8)
    chain(None, ("A", 63))
    caplog.clear()
    assert counted(options()) == (3, 4)
    assert "1 of the IPUs will be idle" in caplog.text
    opts = options().autoRoundNumIPUs(False)
    with pytest.raises(poptorch.Error, match="model specifies the use of 3 IPUs") as caught:
        counted(opts)
    assert "must reserve a minimum of 4" in str(caught.value)
    assert counted(opts.useIpuModel(True)) == (3, 3)  # simulation has no power of two
    with pytest.raises(poptorch.Error, match="Too many IPUs"):
        counted(options().replicationFactor(17).useIpuModel(True), FOUR)


@pytest.mark.spec("parallel", 17, 46)
@pytest.mark.parametrize("ipus", [(0, 1), (1,)])
def test_the_first_release_needs_a_micro_batch_for_every_stage_that_is_there(ipus) -> None:
    def forward(model, x):
        for ipu, layer in zip(ipus, model.layers, strict=True):
            x = poptorch.IPU(ipu, layer)(x).tanh()
        return x, poptorch.identity_loss(x, "mean")

    model, count = Having(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in ipus)), len(ipus)
    eager, x = copy.deepcopy(model), torch.randn(2 * count, 4)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    poptorch.trainingModel(model, 1, gradient_accumulation=count, optimizer=ours)(x)
    sum(eager(part)[1] / count for part in x.chunk(count)).backward()
    theirs.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    inference = poptorch.inferenceModel(model, device_iterations=count)
    torch.testing.assert_close(inference(x)[0][-2:], eager(x)[0][-2:].detach())
    with pytest.raises(poptorch.Error, match="already been assigned"):
        poptorch.IPU(3, eager.layers[0])  # eager calls may annotate again, but not move
    if count == 2:
        few = poptorch.trainingModel(model, 2, gradient_accumulation=1)
        with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(2\)"):
            few.compile(X)


@pytest.mark.spec("parallel", 1)
def test_an_operator_in_no_block_is_refused() -> None:
    def forward(model, x):
        with poptorch.Block("A", ipu_id=0):
            x = x * 2
        return x + 1

    with pytest.raises(poptorch.Error, match=r"(?s)No active Block, all the .*return x \+ 1"):
        place(Having(forward), X, opts=options(training=False), training=False)


@pytest.mark.spec("parallel", 44)
def test_the_loss_belongs_to_the_last_block_and_gradients_to_their_forward_stage() -> None:
    placed = passes(chain(("A", 0), ("B", 1), ("C", 2)))
    assert [str(where) for node, where in placed.items() if node.name == "mean"] == ["2F"]
    for node, where in placed.items():
        label = label_of(node)
        assert where.backward == label.backward
        if label.visit is not None:
            assert where.stage == label.visit - 1
    assert {where.stage for where in placed.values() if where.backward} == {0, 1, 2}


def shared(last: int = 0, change: bool = False) -> Having:
    """A layer is used on device 0 and the last; a buffer on 0 and 1, where it may be changed."""

    def forward(model, x):
        poptorch.Block.start("A", 0)
        x = model.layer(x) + model.count
        poptorch.Block.start("B", 1)
        x = x.relu() + model.count
        if change:
            model.count += 1
        poptorch.Block.start("C", last)
        return poptorch.identity_loss(model.layer(x), "mean")

    return Having(forward, layer=nn.Linear(4, 4), count=torch.zeros(()))


def test_weights_live_where_they_are_used() -> None:
    def homes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
        return homes(place(model, X, opts=options(AUTO())))

    found = homes_of(Chain(None, ("A", 1), ("B", 2)))
    assert [found[f"param.layers.{at}.weight"] for at in range(3)] == [(0,), (1,), (2,)]
    found = homes_of(shared())
    assert (found["param.layer.weight"], found["buffer.count"]) == ((0,), (0, 1))
    with pytest.raises(poptorch.Error, match=r"'layer\.(weight|bias)' is shared by several IPUs"):
        homes_of(shared(last=2))
    with pytest.raises(poptorch.Error, match="'count' is changed on one IPU and used on another"):
        homes_of(shared(change=True))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    """What the engine's log is told at its lowest level."""
    poptorch.setLogLevel("DEBUG")
    with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
        yield caplog.messages


@pytest.mark.spec("parallel", 9, 49)
def test_what_was_decided_is_logged_and_every_operator_with_its_place(told, caplog) -> None:
    chain(("A", None), ("B", 1), strategy=PipelinedExecution(Stage("A", "nope"), "B"))
    assert "does not have: nope. It has: A, B" in caplog.text
    assert "No IPU specified for block A: default to stage_id 0" in caplog.messages
    assert "Starting block id=B stage=1 phase=None ipu=1" in caplog.messages
    nothing = place(nn.Identity(), X, opts=options(training=False), training=False)
    assert (nothing.chips, nothing.reserved) == (0, 0)
    assert "No IPU is used" in caplog.text

    def twice(model, x):
        return (x.relu() * 2).relu()

    def outer(model, x):
        x = model.b1(x * model.scale)
        with poptorch.Block("B", ipu_id=1):
            return poptorch.identity_loss(model.b2(x), "mean")

    b1, b2 = nn.Sequential(Having(twice), Having(twice)), Having(twice)
    place(Having(outer, b1=b1, b2=b2, scale=nn.Parameter(torch.ones(4))), X, opts=options())
    for name, chip, stage in (
        ("Mul:0", 0, 0), ("b1/0/Relu:0", 0, 0), ("b1/1/Relu/1:0", 0, 0), ("b2/Relu:0", 1, 1),
        ("b1/0/ThresholdBackward:0", 0, 2),
    ):  # fmt: skip
        where = f"[float32(2, 4), mode(Pipelined), ipu({chip}), stage({stage})]"
        assert f"{name} {where}" in caplog.messages


@pytest.mark.parametrize("liveness, separate, total, expected", [
    ("AlwaysLive", False, 3, [0, 1, 2, 2, 3, 4]), ("AlwaysLive", True, 4, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwd", False, 6, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwd", True, 6, [0, 1, 2, 4, 5, 6]),
    ("OffChipAfterFwdNoOverlap", False, 8, [0, 2, 4, 8, 10, 12]),
    ("OffChipAfterEachPhase", True, 12, [0, 4, 8, 16, 20, 24]),
])  # fmt: skip
def test_backward_phases_come_after_the_forward_ones(liveness, separate, total, expected) -> None:
    strategy = SerialPhasedExecution("A", "B", "C").useSeparateBackwardPhase(separate)
    strategy.setTensorsLiveness(poptorch.Liveness[liveness])
    layout = chain(("A", 0), ("B", 0), ("C", 0), strategy=strategy)
    placement = freeze(options(strategy), True).placement
    numbers = [phase_number(each, layout, placement) for each in stage_passes(3, training=True)]
    assert (placement.total_phases, numbers) == (total, expected)


def test_rules_of_blocks_and_phases_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Source: PopTorch user guide, "poptorch.Block and poptorch.BeginBlock", "Phased execution"."""
    SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C")))
    assert "The phases have 2, 1 stages" in caplog.text
    caplog.clear()

    def dead(model, x):
        x = model.second(model.first(x))
        model.unread(x)
        return x

    model = Having(dead, **{name: nn.Linear(4, 4) for name in ("first", "second", "unread")})
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    poptorch.BeginBlock(model.first, "first", ipu_id=0)
    poptorch.BeginBlock(model.unread, "unread", ipu_id=0)
    x = torch.randn(6, 4)
    got = poptorch.inferenceModel(model, quick(iterations=3))(x)
    torch.testing.assert_close(got, model(x).detach())
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (unread,) = [m for m in messages if m.startswith("Nothing reads the results of these blocks")]
    assert "left out: unread (" in unread
    (early,) = [m for m in messages if "annotated before a block that runs ahead of it" in m]
    assert early.startswith("Block second ")


SIZES = st.integers(0, 9)


@st.composite
def rows(draw: st.DrawFn) -> list[Unit]:
    number, units = draw(st.integers(1, 7)), []
    for at in range(number):
        begins = None if at and draw(st.booleans()) else f"part{at}"
        units.append(Unit(begins, *(draw(SIZES) for _ in range(4)), joined=draw(st.booleans())))
    return units


def every_way(units: list[Unit], chips: int) -> list[tuple[int, ...]]:
    allowed = [n for n, u in enumerate(units) if n and u.begins is not None and not u.joined]
    return list(itertools.combinations(allowed, chips - 1))


def score(units: list[Unit], cuts: tuple[int, ...], limit: int, pipelined: bool):
    groups = [units[a:b] for a, b in itertools.pairwise([0, *cuts, len(units)])]
    for left, group in zip(reversed(range(len(groups))), groups, strict=True):
        kept = (2 * left + 1 if pipelined else 1) * sum(u.saved_bytes for u in group)
        if kept + sum(u.weight_bytes for u in group) > limit:
            return None
    slowest = max(sum(u.cycles for u in group) for group in groups)
    return slowest, sum(group[0].entering_bytes for group in groups)


# Cut first where that is fastest, after part0, and a byte crosses that need not.
@example([Unit(c + b, int(c), 0, 0, int(b), joined=False) for c, b in ("10", "11", "00", "20")], 3,
         0, False)  # fmt: skip
# What waits on the first of two chips is counted three times, on the last once.
@example([Unit("a", 1, 0, 10), Unit("b", 1, 0, 10)], 2, 30, True)
@given(rows(), st.integers(1, 4), st.integers(0, 60), st.booleans())
def test_no_other_way_is_better(units, chips, limit, pipelined) -> None:
    found = [score(units, cuts, limit, pipelined) for cuts in every_way(units, chips)]
    possible = [each for each in found if each is not None]
    if not possible:
        with pytest.raises(poptorch.Error, match="fits their memory" if found else "cannot be cut"):
            balance(units, chips, limit, pipelined)
        return
    shares = balance(units, chips, limit, pipelined)
    assert [share.ipu for share in shares] == list(range(chips))
    assert sum(share.cycles for share in shares) == sum(unit.cycles for unit in units)
    slowest = max(share.cycles for share in shares)
    assert (slowest, sum(share.entering_bytes for share in shares)) == min(possible)


def staged(model: nn.Module, *inputs: torch.Tensor, opts: poptorch.Options) -> Staged:
    return Captured(model, inputs, sgd).plan(opts).staged


def keys(slots) -> set[str]:
    return {slot.key for slot in slots}


def example_of(name: str, count: int = 3) -> Staged:
    example = STAGE_ZOO[name]
    stages = (poptorch.Stage(f"b{i}").ipu(chip) for i, chip in enumerate(example.chips(count)))
    given = options(poptorch.PipelinedExecution(*stages))
    return staged(example.build(count), *example.inputs(ROWS), opts=given)


@pytest.mark.parametrize("name", STAGE_ZOO)
def test_parts_read_only_what_is_on_their_chip_or_sent_to_it(name: str) -> None:
    found = example_of(name, 4 if name == "skip" else 3)
    made: dict[str, int] = {}
    for stage_pass, graph in found.graphs.items():
        verify.verify_graph(graph)
        assert str(stage_pass) == graph.name
        chip = found.workload.chip_of(stage_pass)
        for slot in graph.inputs:
            if slot.kind is Kind.VALUE:
                sent = {t.target for t in found.transfers if t.value == slot}
                assert chip in {made[slot.key], *sent}
            elif slot.is_state:
                assert chip in found.homes[slot.key]
        for slot in graph.outputs:
            if slot.kind is Kind.VALUE:
                assert slot.key not in made
                made[slot.key] = chip
    assert set().union(*map(values_read, found.graphs.values())) == set(made)
    for transfer in found.transfers:
        assert made[transfer.value.key] != transfer.target
    if name == "skip":  # skipped over stages neither see nor pass on a value
        assert {t.target for t in found.transfers if t.source == forward(0)} == {1, 2, 3}
        assert found.workload.needs[forward(3)] == {forward(0), forward(2)}
    if name == "tied":  # its gradients are added up on its chip
        graphs = found.graphs.items()
        writers = [str(p) for p, graph in graphs if "accum.table.weight" in keys(graph.outputs)]
        assert writers == ["0B", "0U0"]
        assert backward(2) in found.workload.needs[backward(0)]


def test_a_stage_hands_its_result_to_the_next_and_its_gradient_back() -> None:
    found = example_of("mlp", 2)
    crossing = [(str(t.source), t.target, t.value.shape) for t in found.transfers]
    assert crossing == [("0F", 1, (ROWS, 4)), ("1B", 0, (ROWS, 4))]
    written = {str(stage_pass): keys(graph.outputs) for stage_pass, graph in found.graphs.items()}
    assert written["0F"] == values_written(found.graphs[forward(0)])
    assert {"output.0", "loss.1"} <= written["1F"]
    sums = {"accum.layers.0.0.weight", "accum.layers.0.0.bias"}
    assert written["0B"] == sums
    assert written["0U0"] == sums | {key.replace("accum", "param") for key in sums}


def widen(model, x):
    poptorch.Block.start("A", 0)
    x = model.narrow(x)
    poptorch.Block.start("B", 1)
    x = model.back(model.drop(model.wide(x).tanh().sin()))
    poptorch.Block.start("C", 2)
    return poptorch.identity_loss(x.exp(), "sum")


def wide(drop: bool = False) -> Having:
    layers = {"narrow": nn.Linear(4, 4), "wide": nn.Linear(4, 64), "back": nn.Linear(64, 4)}
    return Having(widen, drop=nn.Dropout(0.5) if drop else nn.Identity(), **layers)


def kept(found: Staged, stage: int) -> int:
    """Return how many elements wait on a stage's chip between its two passes."""
    slots = {slot.key: slot for graph in found.graphs.values() for slot in graph.inputs}
    later = (values_written(graph) for each, graph in found.graphs.items() if each.backward)
    waiting = values_read(found.graphs[backward(stage)]).difference(*later)
    return sum(slots[key].numel for key in waiting)


@pytest.mark.slow
def test_pipelined_training_computes_activations_again() -> None:
    again = staged(wide(), X, opts=options())
    assert kept(again, 1) == X.numel()  # what the stage was given, and nothing else
    opts = options()
    opts._Popart.set("autoRecomputation", 0)
    for other in (opts, options(poptorch.ShardedExecution())):
        assert kept(staged(wide(), X, opts=other), 1) > 100


def last(keep: bool) -> Having:
    def forward(model, x):
        poptorch.Block.start("A", 0)
        x = model.narrow(x)
        poptorch.Block.start("B", 1)
        for layer in model.layers:
            x = layer(x).tanh().sin().view(-1, 4, 16).sum(-1)
            x = poptorch.recomputationCheckpoint(x) if keep else x
        return poptorch.identity_loss(x.exp(), "sum")

    layers = nn.ModuleList(nn.Linear(4, 64) for _ in range(2))
    return Having(forward, narrow=nn.Linear(4, 4), layers=layers)


def test_the_last_stage_keeps_what_lies_behind_the_users_last_checkpoint() -> None:
    """It goes back at once; what is in front of a checkpoint it computes again."""
    whole, marked = (staged(last(keep), X, opts=options()) for keep in (False, True))
    assert kept(whole, 1) >= 2 * len(X) * 64  # a wide tensor of each layer
    assert kept(marked, 1) < len(X) * 64
    computed = [str(n.target) for n in marked.graphs[backward(1)].module.graph.nodes]
    counts = [sum(f"{what}.default" in name for name in computed) for what in ("tanh", "exp")]
    assert counts == [2, 0]  # both layers, again


def test_what_was_drawn_is_kept() -> None:
    found = staged(wide(drop=True), X, opts=options())
    drawing = [stage_pass for stage_pass, graph in found.graphs.items() if graph.random]
    assert drawing == [forward(1)]
    assert X.numel() < kept(found, 1) <= X.numel() + 2 * 64


def test_the_norm_of_all_gradients_is_one_exchange_there_and_one_back() -> None:
    example = STAGE_ZOO["mlp"]

    def clipped(model: nn.Module) -> torch.optim.Optimizer:
        return poptorch.optim.Adam(model.parameters(), lr=0.01, max_grad_norm=1.0)

    found = Captured(example.build(3), example.inputs(ROWS), clipped).plan(options()).staged
    assert " ".join(map(str, found.workload.updates)) == "0U0 1U0 2U0 0U1 1U2 2U2"
    crossing = [t for t in found.transfers if t.source.is_update]
    assert {t.target for t in crossing if t.source.round == 0} == {0}
    assert {t.target for t in crossing if t.source.round == 1} == {1, 2}
    assert all(t.value.numel == 1 for t in crossing)
    assert found.homes["optstate.step"] == (0, 1, 2)
    assert "optstate.step" in keys(found.graphs[StagePass(2, Direction.UPDATE, 2)].outputs)


LARGE = 300
LINK = Link(0.0, 1e10, copying=0.0, waking=0.0)  # two layers take as long as the others' work


def trained(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.layers(x)
    weights = torch.arange(float(out.shape[-1]))  # a norm's squares add up to one number
    return out, poptorch.identity_loss(out.square() * weights, "mean")


def deep(*between: nn.Module, size: int = LARGE) -> Having:
    layers = (layer for _ in range(4) for layer in (nn.Linear(size, size), nn.Tanh(), *between))
    return Having(trained, layers=nn.Sequential(*layers))


def attending() -> Having:
    """Attention makes tensors that do not lie as their dimensions say."""
    layers = (nn.TransformerEncoderLayer(128, 2, 256, 0.0, batch_first=True) for _ in range(3))
    return Having(trained, layers=nn.Sequential(*layers))


def captured(module: nn.Module, *shape: int) -> Graph:
    torch.manual_seed(3)
    return capture(module, torch.ones(shape), training=True).graph


def gradients(graph: Graph) -> set[str]:
    return {slot.path for slot in graph.gradients}


def values_of(slots) -> set[str]:
    return {slot.key for slot in slots if slot.kind is Kind.VALUE}


def run(graph: Graph, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return graph({key: value.clone() for key, value in given.items()})


@pytest.mark.parametrize("module, shape", [
    (deep(nn.BatchNorm1d(LARGE)), (4, LARGE)), (deep(nn.Dropout(0.5)), (4, LARGE)),
    (attending(), (2, 8, 128)),
], ids=["norm", "dropout", "attention"])  # fmt: skip
def test_both_parts_compute_what_the_whole_does(module: nn.Module, shape: tuple[int, ...]) -> None:
    whole = captured(module, *shape)
    before, parts = str(whole.module.graph), early(whole, 2, LINK)
    assert str(whole.module.graph) == before
    assert parts is not None
    first, second = parts
    given = {slot.key: torch.rand(slot.shape).to(slot.dtype) for slot in whole.inputs}
    expected, made = run(whole, given), run(first, given)
    # What the first part changes is changed when the second one reads it.
    made |= second(given | {key: made[key] for key in first.updates} | made)
    handed = values_of(first.outputs)
    assert made.keys() - expected.keys() == handed == values_of(second.inputs)
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, rtol=0, atol=0, msg=key)
    assert gradients(first)
    assert gradients(first).isdisjoint(gradients(second))
    assert gradients(first) | gradients(second) == gradients(whole)
    assert all(made[key].is_contiguous() for key in handed)
    for part in parts:
        verify.verify_graph(part)


def test_late_layers_leave_the_sooner_the_slower_the_link_unless_the_second_part_draws() -> None:
    """Its draws would be others: each run of a graph begins a sequence of its own."""
    whole = captured(deep(), 4, LARGE)
    for bandwidth, late in ((1e10, {"4", "6"}), (1e9, {"6"})):
        parts = early(whole, 2, replace(LINK, bandwidth=bandwidth))
        names = [{path[7] for path in gradients(part)} for part in parts]
        assert names == [late, {"0", "2", "4", "6"} - late]
    for fast in (replace(LINK, bandwidth=1e12), replace(LINK, waking=1e-4), Link(0.0, 1e10)):
        assert early(whole, 2, fast) is None
    noisy = deep()
    noisy.layers[0].register_forward_hook(
        lambda layer, x, out: out.register_hook(lambda g: g + torch.rand_like(g)) and None
    )
    assert early(captured(noisy, 4, LARGE), 2, LINK) is None
