"""A micro graph in two, and the parts of a cut program: what they compute, read and keep."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import X, capture, options
from helpers.staging import ROWS, STAGE_ZOO, Captured, sgd
from helpers.workloads import backward, forward
from helpers.wrapping import Having
from poptorch._ipu_model.scaling import Link
from poptorch._ir import verify
from poptorch._ir.blocks import Direction, StagePass
from poptorch._ir.graph import Graph
from poptorch._ir.plan import Staged, values_read, values_written
from poptorch._ir.slots import Kind
from poptorch._place import early


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
    before = str(whole.module.graph)
    parts = early(whole, 2, LINK)
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
