"""Which stage and device a block gets, by the strategy, and what is refused."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import Chain, X, chain, homes, options, passes, place, stages
from helpers.wrapping import Having
from helpers.wrapping import options as quick
from poptorch import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch._ir.block_labels import label_of, stage_passes
from poptorch._ir.plan import Layout
from poptorch._place.place import phase_number
from poptorch.options.freeze_options import freeze

Step = tuple[str | None, int | None] | None
"""The block in which a layer begins, and the device of the block."""
MakeStrategy = Callable[[], Any]

AUTO = functools.partial(PipelinedExecution, poptorch.AutoStage.AutoIncrement)
FOUR = (("A", 0), ("B", 1), ("C", 2), ("D", 3))
RETURN = (("0", 0), ("1", 1), ("2", 0))
BACK = [(0, ("0",)), (1, ("1",)), (0, ("2",))]


def default() -> None:
    """No strategy is set."""


def two_stages_in_a_phase() -> SerialPhasedExecution:
    strategy = SerialPhasedExecution([Phase(Stage("A"), Stage("B")), Phase("C", "D")])
    strategy.phase(0).ipus(0, 2)
    return strategy


def phases_on_alternating_devices() -> ParallelPhasedExecution:
    strategy = ParallelPhasedExecution(*(Phase(Stage(a), Stage(b)) for a, b in ("AB", "CD")))
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    return strategy


def odd_phase_on_an_even_device() -> ParallelPhasedExecution:
    strategy = ParallelPhasedExecution(Phase("A"), Phase("B"))
    strategy.phase(1).ipus(2)
    return strategy


# Blocks and their devices, a strategy; the devices of stages with their blocks, and the depth.
PLACED = [
    ((None, ("A", 1), None), default, [(0, ()), (1, ("A",))], 2),
    ((("A", 0), ("B", 0)), default, [(0, ("A", "B"))], 1),
    ((None, None), default, [(0, ())], 1),
    (FOUR, default, [(0, ("A",)), (1, ("B",)), (2, ("C",)), (3, ("D",))], 4),
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
    (tuple((name, None) for name in "ABCD"), phases_on_alternating_devices,
     [(0, ("A",)), (2, ("B",)), (1, ("C",)), (3, ("D",))], None),
    (tuple((name, None) for name in "ABCD"), two_stages_in_a_phase,
     [(0, ("A",)), (2, ("B",)), (0, ("C", "D"))], None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.spec("parallel", 3, 4, 9, 11, 12, 13, 14, 16, 19, 20, 24, 26, 27)
@pytest.mark.parametrize("steps, strategy, expected, depth", PLACED)
def test_blocks_get_stages_and_devices(
    steps: tuple[Step, ...],
    strategy: MakeStrategy,
    expected: list[tuple[int, tuple[str, ...]]],
    depth: int | None,
) -> None:
    layout = chain(*steps, strategy=strategy())

    assert stages(layout) == expected
    if depth is not None:
        assert layout.depth == depth


def test_stages_of_one_phase_have_its_number() -> None:
    layout = chain(*((name, None) for name in "ABCD"), strategy=two_stages_in_a_phase())

    assert [stage.phase for stage in layout.stages] == [0, 0, 1]


SHARED = Stage("A", "B")
# Blocks and their devices, a strategy; the class and a part of the message of the error.
REFUSED = [
    ((("A", 0), ("B", None)), default, AssertionError, r"AutoStage\.SameAsIpu .* for block B"),
    ((("A", 0), ("C", 0)), lambda: PipelinedExecution(SHARED), AssertionError,
     "Unknown Block C.*known blocks: A, B"),
    ((("A", 0), ("B", 1)), lambda: PipelinedExecution(SHARED), poptorch.Error,
     "pipeline stage can run on only one IPU"),
    ((("A", 0), ("B", 0)), lambda: ParallelPhasedExecution(Phase("A"), Phase("B")), poptorch.Error,
     "even phases must run on even IPUs"),
    ((("A", 0), ("B", 1)), odd_phase_on_an_even_device, poptorch.Error,
     "even phases must run on even IPUs"),
    ((("A", -1),), default, poptorch.Error, "cannot be negative"),
    (RETURN, default, poptorch.Error, r"ids must increase along the data flow"
     r".*block 2 \(stage 0\) reads a result of block 1 \(stage 1\)"),
    ((("A", 0), ("B", 0)), lambda: SerialPhasedExecution("B", "A"), poptorch.Error,
     "Phase ids must increase along the data flow"),
    ((None, ("A", 64)), default, poptorch.Error,
     r"Too many IPUs requested \(65\).*require distributed execution"),
]  # fmt: skip


def test_a_typo_in_a_block_s_id_names_the_nearest_one() -> None:
    steps, strategy = (("A", 0), ("decoder", 1)), PipelinedExecution(Stage("A"), Stage("decodr"))
    with pytest.raises(AssertionError, match="the block 'decodr' of the strategy"):
        chain(*steps, strategy=strategy)


@pytest.mark.spec("parallel", 10, 13, 23, 24, 43)
@pytest.mark.parametrize("steps, strategy, error, phrase", REFUSED)
def test_models_that_cannot_be_placed_are_refused(
    steps: tuple[Step, ...], strategy: MakeStrategy, error: type[Exception], phrase: str
) -> None:
    with pytest.raises(error, match=f"(?s){phrase}") as refused:
        chain(*steps, strategy=strategy())

    assert isinstance(refused.value, poptorch.Error)


@pytest.mark.spec("parallel", 1)
def test_an_operator_in_no_block_is_refused() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("A", ipu_id=0):
            x = x * 2
        return x + 1

    with pytest.raises(poptorch.Error, match=r"(?s)No active Block, all the .*return x \+ 1"):
        place(Having(forward), X, opts=options(training=False), training=False)


# How many micro-batches a pipeline needs.


def in_four_stages(training: bool, count: int, strategy: Any = None) -> Layout:
    """Four layers in stages of their own, with this number of micro-batches."""
    counts = {"accumulation": count} if training else {"iterations": count}
    return chain(*FOUR, training=training, strategy=strategy, **counts)


@pytest.mark.parametrize("training, enough", [(True, 7), (False, 4)])
def test_a_pipeline_with_a_micro_batch_for_each_pass_is_placed(training: bool, enough: int) -> None:
    assert in_four_stages(training, enough).depth == 4


@pytest.mark.spec("parallel", 17, 18)
@pytest.mark.parametrize(
    "training, too_few, phrase",
    [
        (
            True,
            6,
            r"gradientAccumulation must be greater than or equal.*\(7\)"
            ".*there are 3 additional stages",
        ),
        (False, 3, r"deviceIterations must be greater .* \(4\)"),
    ],
)
def test_a_pipeline_with_fewer_micro_batches_is_refused(
    training: bool, too_few: int, phrase: str
) -> None:
    with pytest.raises(poptorch.Error, match=f"(?s){phrase}"):
        in_four_stages(training, too_few)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "strategy", [ShardedExecution(), SerialPhasedExecution("A", "B", "C", "D")], ids=repr
)
def test_other_strategies_need_one_micro_batch(training: bool, strategy: Any) -> None:
    assert len(in_four_stages(training, 1, strategy).stages) == 4


# How many devices there are.


def counted(opts: poptorch.Options, steps: tuple[Step, ...] = FOUR[:3]) -> dict[str, int]:
    """The devices that a chain uses, and those that are reserved for it."""
    layout = place(Chain(*steps), X, opts=opts)
    return {"used": layout.chips, "reserved": layout.reserved}


@pytest.mark.spec("parallel", 22)
def test_devices_are_counted_up_to_the_highest() -> None:
    assert counted(options(), (("A", 3),)) == {"used": 4, "reserved": 4}


def test_the_highest_device_is_the_sixty_fourth() -> None:
    assert chain(None, ("A", 63)).chips == 64


@pytest.mark.spec("parallel", 21)
def test_devices_of_all_replicas_are_rounded_to_a_power_of_two() -> None:
    opts = options().replicationFactor(3)

    assert counted(opts, FOUR[:2]) == {"used": 2, "reserved": 8}


@pytest.mark.spec("parallel", 21)
def test_a_line_says_how_many_devices_are_idle(caplog: pytest.LogCaptureFixture) -> None:
    assert counted(options()) == {"used": 3, "reserved": 4}
    assert "1 of the IPUs will be idle" in caplog.text


@pytest.mark.spec("parallel", 21)
def test_a_number_of_chips_that_may_not_be_rounded_must_be_a_power_of_two() -> None:
    with pytest.raises(poptorch.Error, match="model specifies the use of 3 IPUs") as refused:
        counted(options().autoRoundNumIPUs(False))

    assert "must reserve a minimum of 4" in str(refused.value)


@pytest.mark.spec("parallel", 21)
def test_a_simulation_needs_no_power_of_two() -> None:
    opts = options().autoRoundNumIPUs(False).useIpuModel(True)

    assert counted(opts) == {"used": 3, "reserved": 3}


@pytest.mark.spec("parallel", 23)
def test_more_devices_than_one_process_can_have_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="Too many IPUs"):
        counted(options().replicationFactor(17).useIpuModel(True), FOUR)


# Layers that the first release placed by ``IPU``.


class PlacedByIPU:
    """Layers that ``forward`` gives to devices; one micro-batch of two rows for each layer.

    Args:
        ipus: the device of each layer.
    """

    def __init__(self, ipus: tuple[int, ...]) -> None:
        self.ipus = ipus
        self.count = len(ipus)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in ipus)
        self.model = Having(self.forward, layers=layers)
        self.eager = copy.deepcopy(self.model)
        self.x = torch.randn(2 * self.count, 4)

    def forward(self, model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for ipu, layer in zip(self.ipus, model.layers, strict=True):
            x = poptorch.IPU(ipu, layer)(x).tanh()
        return x, poptorch.identity_loss(x, "mean")


@pytest.fixture(params=[(0, 1), (1,)], ids=["two devices", "the second device"])
def placed_by_ipu(request: pytest.FixtureRequest) -> PlacedByIPU:
    return PlacedByIPU(request.param)


@pytest.mark.spec("parallel", 17, 46)
def test_the_first_release_trains_with_a_micro_batch_for_every_existing_stage(
    placed_by_ipu: PlacedByIPU,
) -> None:
    model, eager, count = placed_by_ipu.model, placed_by_ipu.eager, placed_by_ipu.count
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)

    poptorch.trainingModel(model, 1, gradient_accumulation=count, optimizer=ours)(placed_by_ipu.x)

    for micro_batch in placed_by_ipu.x.chunk(count):
        _, loss = eager(micro_batch)
        (loss / count).backward()
    theirs.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


@pytest.mark.spec("parallel", 46)
def test_the_first_release_infers_with_a_micro_batch_for_every_existing_stage(
    placed_by_ipu: PlacedByIPU,
) -> None:
    inference = poptorch.inferenceModel(placed_by_ipu.model, device_iterations=placed_by_ipu.count)

    out, _ = inference(placed_by_ipu.x)

    expected, _ = placed_by_ipu.eager(placed_by_ipu.x)
    torch.testing.assert_close(out[-2:], expected[-2:].detach())


@pytest.mark.spec("parallel", 46)
def test_an_eager_call_may_annotate_a_layer_again_but_not_move_it(
    placed_by_ipu: PlacedByIPU,
) -> None:
    placed_by_ipu.eager(placed_by_ipu.x)
    placed_by_ipu.eager(placed_by_ipu.x)

    with pytest.raises(poptorch.Error, match="already been assigned"):
        poptorch.IPU(3, placed_by_ipu.eager.layers[0])


@pytest.mark.spec("parallel", 17)
def test_the_first_release_refuses_fewer_micro_batches_than_stages() -> None:
    model = PlacedByIPU((0, 1)).model
    training = poptorch.trainingModel(model, 2, gradient_accumulation=1)

    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(2\)"):
        training.compile(X)


# Operators, gradients and weights.


@pytest.mark.spec("parallel", 44)
def test_the_loss_belongs_to_the_last_block() -> None:
    placed = passes(chain(("A", 0), ("B", 1), ("C", 2)))

    assert [str(where) for node, where in placed.items() if node.name == "mean"] == ["2F"]


@pytest.mark.spec("parallel", 44)
def test_gradients_belong_to_the_stage_of_their_forward_pass() -> None:
    placed = passes(chain(("A", 0), ("B", 1), ("C", 2)))

    for node, where in placed.items():
        label = label_of(node)
        assert where.backward == label.backward, node
        if label.visit is not None:
            assert where.stage == label.visit - 1, node
    assert {where.stage for where in placed.values() if where.backward} == {0, 1, 2}


def shared(last: int = 0, change: bool = False) -> Having:
    """A layer is used on device 0 and on the last, a buffer on the devices 0 and 1.

    Args:
        last: the device of the last block.
        change: whether the buffer is changed on device 1.
    """

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", 0)
        x = model.layer(x) + model.count
        poptorch.Block.start("B", 1)
        x = x.relu() + model.count
        if change:
            model.count += 1
        poptorch.Block.start("C", last)
        return poptorch.identity_loss(model.layer(x), "mean")

    return Having(forward, layer=nn.Linear(4, 4), count=torch.zeros(()))


def devices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The devices of weights and buffers, in a pipeline of automatic stages."""
    return homes(place(model, X, opts=options(AUTO())))


def test_a_weight_is_on_the_device_that_uses_it() -> None:
    found = devices(Chain(None, ("A", 1), ("B", 2)))

    assert found["param.layers.0.weight"] == (0,)
    assert found["param.layers.1.weight"] == (1,)
    assert found["param.layers.2.weight"] == (2,)


def test_a_weight_may_be_used_by_several_stages_of_one_device() -> None:
    assert devices(shared())["param.layer.weight"] == (0,)


def test_a_buffer_that_is_only_read_is_on_every_device_that_reads_it() -> None:
    assert devices(shared())["buffer.count"] == (0, 1)


def test_a_weight_of_several_devices_is_refused() -> None:
    with pytest.raises(poptorch.Error, match=r"'layer\.(weight|bias)' is shared by several IPUs"):
        devices(shared(last=2))


def test_a_buffer_that_one_device_changes_and_another_reads_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="'count' is changed on one IPU and used on another"):
        devices(shared(change=True))


# Phases.


@pytest.mark.parametrize(
    "liveness, separate, total, expected",
    [
        ("AlwaysLive", False, 3, [0, 1, 2, 2, 3, 4]),
        ("AlwaysLive", True, 4, [0, 1, 2, 4, 5, 6]),
        ("OffChipAfterFwd", False, 6, [0, 1, 2, 4, 5, 6]),
        ("OffChipAfterFwd", True, 6, [0, 1, 2, 4, 5, 6]),
        ("OffChipAfterFwdNoOverlap", False, 8, [0, 2, 4, 8, 10, 12]),
        ("OffChipAfterEachPhase", True, 12, [0, 4, 8, 16, 20, 24]),
    ],
)
def test_backward_phases_come_after_the_forward_ones(
    liveness: str, separate: bool, total: int, expected: list[int]
) -> None:
    strategy = SerialPhasedExecution("A", "B", "C").useSeparateBackwardPhase(separate)
    strategy.setTensorsLiveness(poptorch.Liveness[liveness])

    layout = chain(("A", 0), ("B", 0), ("C", 0), strategy=strategy)

    placement = freeze(options(strategy), True).placement
    numbers = [phase_number(each, layout, placement) for each in stage_passes(3, training=True)]
    assert placement.total_phases == total
    assert numbers == expected


def test_phases_with_different_numbers_of_stages_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Source: PopTorch user guide, "Phased execution"."""
    SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C")))

    assert "The phases have 2, 1 stages" in caplog.text


# Lines of the log.


@pytest.fixture
def debug_lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Lines of the engine, at the lowest level."""
    poptorch.setLogLevel("DEBUG")
    caplog.set_level(logging.DEBUG, logger="poptorch:cpp")
    return caplog


@pytest.mark.spec("parallel", 9, 49)
def test_blocks_and_their_devices_are_logged(debug_lines: pytest.LogCaptureFixture) -> None:
    chain(("A", None), ("B", 1), strategy=PipelinedExecution(Stage("A", "nope"), "B"))

    assert "does not have: nope. It has: A, B" in debug_lines.text
    assert "No IPU specified for block A: default to stage_id 0" in debug_lines.messages
    assert "Starting block id=B stage=1 phase=None ipu=1" in debug_lines.messages


def test_a_model_without_operators_uses_no_device_and_says_so(
    debug_lines: pytest.LogCaptureFixture,
) -> None:
    layout = place(nn.Identity(), X, opts=options(training=False), training=False)

    assert layout.chips == 0
    assert layout.reserved == 0
    assert "No IPU is used" in debug_lines.text


class TwoRelus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.relu() * 2).relu()


class Nested(nn.Module):
    """Layers in layers; ``b2`` is on the second device."""

    def __init__(self) -> None:
        super().__init__()
        self.b1 = nn.Sequential(TwoRelus(), TwoRelus())
        self.b2 = TwoRelus()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b1(x * self.scale)
        with poptorch.Block("B", ipu_id=1):
            return poptorch.identity_loss(self.b2(x), "mean")


@pytest.mark.spec("parallel", 49)
def test_every_operator_is_logged_with_its_place(debug_lines: pytest.LogCaptureFixture) -> None:
    place(Nested(), X, opts=options())

    for name, device, stage in [
        ("Mul:0", 0, 0),
        ("b1/0/Relu:0", 0, 0),
        ("b1/1/Relu/1:0", 0, 0),
        ("b2/Relu:0", 1, 1),
        ("b1/0/ThresholdBackward:0", 0, 2),
    ]:
        where = f"[float32(2, 4), mode(Pipelined), ipu({device}), stage({stage})]"
        assert f"{name} {where}" in debug_lines.messages


class BlocksOutOfOrder(nn.Module):
    """Blocks that were annotated in another order than they run; the result of one is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.unread = nn.Linear(4, 4)
        poptorch.BeginBlock(self.second, "second", ipu_id=1)
        poptorch.BeginBlock(self.first, "first", ipu_id=0)
        poptorch.BeginBlock(self.unread, "unread", ipu_id=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        self.unread(x)
        return x


@pytest.fixture
def blocks_out_of_order(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a call, whose result is that of eager PyTorch."""
    model, x = BlocksOutOfOrder(), torch.randn(6, 4)
    got = poptorch.inferenceModel(model, quick(iterations=3))(x)
    torch.testing.assert_close(got, model(x).detach())
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_warning_names_a_block_whose_results_nothing_reads(
    blocks_out_of_order: list[str],
) -> None:
    """Source: PopTorch user guide, "poptorch.Block and poptorch.BeginBlock"."""
    (warning,) = [text for text in blocks_out_of_order if text.startswith("Nothing uses the")]

    assert "results of these blocks" in warning
    assert "left out: unread (" in warning


def test_a_warning_names_a_block_that_was_annotated_before_one_that_runs_ahead(
    blocks_out_of_order: list[str],
) -> None:
    """Source: PopTorch user guide, "poptorch.Block and poptorch.BeginBlock"."""
    ahead = "annotated before a block that runs earlier"

    (warning,) = [text for text in blocks_out_of_order if ahead in text]

    assert warning.startswith("Block second ")
