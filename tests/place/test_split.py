"""A graph cut into stages: what each computes and keeps, and what they hand to one another."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import X, options
from helpers.cases import slow_but_the_first
from helpers.staging import ROWS, STAGE_ZOO, Captured, sgd
from helpers.workloads import backward, forward
from helpers.wrapping import Having
from poptorch._ir import verify
from poptorch._ir.block_labels import Direction, StagePass
from poptorch._ir.plan import Staged, values_read, values_written
from poptorch._ir.slots import Kind, Slot


def planned(captured: Captured, opts: poptorch.Options) -> Staged:
    """Return the staged form of a plan for some options."""
    plan = captured.plan(opts)
    assert plan.staged is not None
    return plan.staged


def staged(model: nn.Module, *inputs: torch.Tensor, opts: poptorch.Options) -> Staged:
    return planned(Captured(model, inputs, sgd), opts)


def keys(slots: Iterable[Slot]) -> set[str]:
    return {slot.key for slot in slots}


def example_of(name: str, count: int = 3) -> Staged:
    """An example of the zoo, in this number of blocks with a stage each."""
    example = STAGE_ZOO[name]
    stages = [poptorch.Stage(f"b{i}").ipu(chip) for i, chip in enumerate(example.chips(count))]
    opts = options(poptorch.PipelinedExecution(*stages))
    return staged(example.build(count), *example.inputs(ROWS), opts=opts)


@pytest.fixture(scope="module", params=slow_but_the_first(STAGE_ZOO))
def zoo(request: pytest.FixtureRequest) -> Staged:
    """Every example of the zoo in stages."""
    torch.manual_seed(0)
    return example_of(request.param, 4 if request.param == "skip" else 3)


def chip_that_made(found: Staged) -> dict[str, int]:
    """The chip that computes each value, in the order of the graphs."""
    return {
        slot.key: found.workload.chip_of(stage_pass)
        for stage_pass, graph in found.graphs.items()
        for slot in graph.outputs
        if slot.kind is Kind.VALUE
    }


def test_every_part_is_a_valid_graph_with_the_name_of_its_pass(zoo: Staged) -> None:
    for stage_pass, graph in zoo.graphs.items():
        verify.verify_graph(graph)
        assert graph.name == str(stage_pass)


def test_parts_read_only_values_that_are_made_before_on_their_chip_or_sent_to_it(
    zoo: Staged,
) -> None:
    made: dict[str, int] = {}
    for stage_pass, graph in zoo.graphs.items():
        chip = zoo.workload.chip_of(stage_pass)
        for slot in graph.inputs:
            if slot.kind is Kind.VALUE:
                sent_to = {t.target for t in zoo.transfers if t.value == slot}
                assert chip in {made[slot.key], *sent_to}, f"{slot.key} in {stage_pass}"
        for slot in graph.outputs:
            if slot.kind is Kind.VALUE:
                assert slot.key not in made, f"{slot.key} is made twice"
                made[slot.key] = chip


def test_parts_read_only_state_of_their_chip(zoo: Staged) -> None:
    for stage_pass, graph in zoo.graphs.items():
        chip = zoo.workload.chip_of(stage_pass)
        for slot in graph.inputs:
            if slot.kind is not Kind.VALUE and slot.is_state:
                assert chip in zoo.homes[slot.key], f"{slot.key} in {stage_pass}"


def test_every_value_that_is_made_is_read(zoo: Staged) -> None:
    read = set().union(*map(values_read, zoo.graphs.values()))

    assert read == set(chip_that_made(zoo))


def test_no_value_is_sent_to_the_chip_that_made_it(zoo: Staged) -> None:
    made = chip_that_made(zoo)

    for transfer in zoo.transfers:
        assert made[transfer.value.key] != transfer.target, transfer


def test_stages_that_a_value_skips_neither_see_it_nor_pass_it_on() -> None:
    found = example_of("skip", 4)

    assert {t.target for t in found.transfers if t.source == forward(0)} == {1, 2, 3}
    assert found.workload.needs[forward(3)] == {forward(0), forward(2)}


def test_gradients_of_a_tied_weight_are_added_up_on_its_chip() -> None:
    found = example_of("tied")

    writers = [
        str(stage_pass)
        for stage_pass, graph in found.graphs.items()
        if "accum.table.weight" in keys(graph.outputs)
    ]
    assert writers == ["0B", "0U0"]
    assert backward(2) in found.workload.needs[backward(0)]


@pytest.fixture(scope="module")
def two_layers() -> Staged:
    torch.manual_seed(0)
    return example_of("mlp", 2)


@pytest.fixture(scope="module")
def written(two_layers: Staged) -> dict[str, set[str]]:
    """Return what each part of the two layers writes."""
    return {str(each): keys(graph.outputs) for each, graph in two_layers.graphs.items()}


SUMS = {"accum.layers.0.0.weight", "accum.layers.0.0.bias"}
"""Accumulated gradients of the first layer."""


def test_a_stage_hands_its_result_to_the_next_and_its_gradient_back(two_layers: Staged) -> None:
    crossing = [(str(t.source), t.target, t.value.shape) for t in two_layers.transfers]

    assert crossing == [("0F", 1, (ROWS, 4)), ("1B", 0, (ROWS, 4))]


def test_the_forward_pass_of_the_first_stage_writes_values_only(
    two_layers: Staged, written: dict[str, set[str]]
) -> None:
    assert written["0F"] == values_written(two_layers.graphs[forward(0)])


def test_the_forward_pass_of_the_last_stage_writes_the_results(
    written: dict[str, set[str]],
) -> None:
    assert {"output.0", "loss.1"} <= written["1F"]


def test_the_backward_pass_of_a_stage_adds_up_its_gradients(
    written: dict[str, set[str]],
) -> None:
    assert written["0B"] == SUMS


def test_the_update_of_a_stage_writes_its_weights_and_empties_their_sums(
    written: dict[str, set[str]],
) -> None:
    weights = {key.replace("accum", "param") for key in SUMS}

    assert written["0U0"] == SUMS | weights


# What is kept between the passes of a stage, and what is computed again.


def widening(drop: bool = False) -> Having:
    """Three stages; inside the second one, tensors have 64 numbers per row."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", 0)
        x = model.narrow(x)
        poptorch.Block.start("B", 1)
        x = model.back(model.drop(model.wide(x).tanh().sin()))
        poptorch.Block.start("C", 2)
        return poptorch.identity_loss(x.exp(), "sum")

    return Having(
        forward,
        narrow=nn.Linear(4, 4),
        wide=nn.Linear(4, 64),
        back=nn.Linear(64, 4),
        drop=nn.Dropout(0.5) if drop else nn.Identity(),
    )


def kept(found: Staged, stage: int) -> int:
    """How many elements wait on a stage's chip between its two passes."""
    slots = {slot.key: slot for graph in found.graphs.values() for slot in graph.inputs}
    later = (values_written(graph) for each, graph in found.graphs.items() if each.backward)
    waiting = values_read(found.graphs[backward(stage)]).difference(*later)
    return sum(slots[key].numel for key in waiting)


@pytest.fixture(scope="module")
def captured_widening() -> Captured:
    """Return the three stages without dropout, captured once for plans of several options."""
    return Captured(widening(), (X,), sgd)


@pytest.mark.slow
def test_pipelined_training_keeps_only_the_inputs_of_a_stage(captured_widening: Captured) -> None:
    found = planned(captured_widening, options())

    assert kept(found, stage=1) == X.numel()


@pytest.mark.slow
def test_pipelined_training_keeps_activations_without_recomputation(
    captured_widening: Captured,
) -> None:
    opts = options()
    opts._Popart.set("autoRecomputation", 0)

    assert kept(planned(captured_widening, opts), stage=1) > 100


@pytest.mark.slow
def test_sharded_training_keeps_activations(captured_widening: Captured) -> None:
    opts = options(poptorch.ShardedExecution())

    assert kept(planned(captured_widening, opts), stage=1) > 100


def test_random_values_are_kept_and_not_drawn_again() -> None:
    """The mask of dropout waits, of 64 numbers for each of the two rows."""
    found = staged(widening(drop=True), X, opts=options())

    drawing = [stage_pass for stage_pass, graph in found.graphs.items() if graph.random]
    assert drawing == [forward(1)]
    assert X.numel() < kept(found, stage=1) <= X.numel() + 2 * 64


def two_wide_layers_last(checkpoint: bool) -> Having:
    """The second and last stage has two layers of 64 numbers a row, each with a checkpoint."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", 0)
        x = model.narrow(x)
        poptorch.Block.start("B", 1)
        for layer in model.layers:
            x = layer(x).tanh().sin().view(-1, 4, 16).sum(-1)
            x = poptorch.recomputationCheckpoint(x) if checkpoint else x
        return poptorch.identity_loss(x.exp(), "sum")

    layers = nn.ModuleList(nn.Linear(4, 64) for _ in range(2))
    return Having(forward, narrow=nn.Linear(4, 4), layers=layers)


def test_the_last_stage_goes_back_at_once_and_keeps_everything() -> None:
    whole = staged(two_wide_layers_last(checkpoint=False), X, opts=options())

    a_wide_tensor_of_each_layer = 2 * len(X) * 64
    assert kept(whole, stage=1) >= a_wide_tensor_of_each_layer


def test_the_last_stage_recomputes_operators_before_the_last_checkpoint() -> None:
    marked = staged(two_wide_layers_last(checkpoint=True), X, opts=options())

    computed = [str(node.target) for node in marked.graphs[backward(1)].module.graph.nodes]
    assert kept(marked, stage=1) < len(X) * 64
    assert sum("tanh.default" in name for name in computed) == 2  # of both layers
    assert sum("exp.default" in name for name in computed) == 0  # behind the checkpoint


# The norm of all gradients.


@pytest.fixture(scope="module")
def clipping() -> Staged:
    """Three stages whose gradients are clipped by the norm of all."""
    torch.manual_seed(0)
    example = STAGE_ZOO["mlp"]

    def clipped(model: nn.Module) -> torch.optim.Optimizer:
        return poptorch.optim.Adam(model.parameters(), lr=0.01, max_grad_norm=1.0)

    return planned(Captured(example.build(3), example.inputs(ROWS), clipped), options())


def test_an_update_with_the_norm_of_all_gradients_has_three_rounds(clipping: Staged) -> None:
    assert list(map(str, clipping.workload.updates)) == ["0U0", "1U0", "2U0", "0U1", "1U2", "2U2"]


def test_the_norm_of_all_gradients_is_one_exchange_there_and_one_back(clipping: Staged) -> None:
    crossing = [t for t in clipping.transfers if t.source.is_update]

    assert {t.target for t in crossing if t.source.round == 0} == {0}
    assert {t.target for t in crossing if t.source.round == 1} == {1, 2}
    assert {t.value.numel for t in crossing} == {1}


def test_every_chip_counts_steps_itself(clipping: Staged) -> None:
    last_update = clipping.graphs[StagePass(2, Direction.UPDATE, 2)]

    assert clipping.homes["optstate.step"] == (0, 1, 2)
    assert "optstate.step" in keys(last_update.outputs)
