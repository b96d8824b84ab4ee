"""A micro graph in two: what both parts compute, and when there are two."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import capture
from helpers.wrapping import Having
from poptorch._ir import verify
from poptorch._ir.graph import Graph
from poptorch._ir.slots import Kind
from poptorch._place import early

LARGE = 300


def trained(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.layers(x)
    weights = torch.arange(float(out.shape[-1]))  # a norm's squares add up to one number
    return out, poptorch.identity_loss(out.square() * weights, "mean")


def deep(*between: nn.Module, size: int = LARGE) -> Having:
    """Layers of one size, one after another, each followed by what is ``between``."""
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
    parts = early(whole)
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


def test_late_layers_come_first_and_early_ones_leave_work() -> None:
    names = [{path[7] for path in gradients(part)} for part in early(captured(deep(), 4, LARGE))]
    assert names == [{"4", "6"}, {"0", "2"}]


def test_what_is_small_or_would_draw_in_the_second_part_stays_whole() -> None:
    """Its draws would be others: each run of a graph begins a sequence of its own."""
    assert early(captured(deep(size=30), 4, 30)) is None
    noisy = deep()
    noisy.layers[0].register_forward_hook(
        lambda layer, x, out: out.register_hook(lambda g: g + torch.rand_like(g)) and None
    )
    assert early(captured(noisy, 4, LARGE)) is None
