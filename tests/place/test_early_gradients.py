"""A backward pass in two parts, so that the first gradients can be sent while others are made."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import capture
from helpers.wrapping import Having
from poptorch._cost.links import Link
from poptorch._ir import verify
from poptorch._ir.graph import Graph
from poptorch._ir.slots import Kind, Slot
from poptorch._place import early

WIDTH = 300
LINK = Link(0.0, 1e10, copying=0.0, waking=0.0)
"""Sending the gradients of two layers takes as long as the work of the other two."""
Values = dict[str, torch.Tensor]


def trained(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.layers(x)
    weights = torch.arange(float(out.shape[-1]))  # a norm's squares add up to one number
    return out, poptorch.identity_loss(out.square() * weights, "mean")


def deep(*between: nn.Module) -> Having:
    """Four linear layers, each with an activation and what is given behind it."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), *between))
    return Having(trained, layers=nn.Sequential(*layers))


def attending() -> Having:
    """Three layers of attention, whose tensors have layouts that differ from their dimensions."""
    layers = (nn.TransformerEncoderLayer(128, 2, 256, 0.0, batch_first=True) for _ in range(3))
    return Having(trained, layers=nn.Sequential(*layers))


def captured(module: nn.Module, *shape: int) -> Graph:
    torch.manual_seed(3)
    return capture(module, torch.ones(shape), training=True).graph


def gradients(graph: Graph) -> set[str]:
    return {slot.path for slot in graph.gradients}


def values_of(slots: Iterable[Slot]) -> set[str]:
    return {slot.key for slot in slots if slot.kind is Kind.VALUE}


def run(graph: Graph, given: Values) -> Values:
    torch.manual_seed(5)
    return graph({key: value.clone() for key, value in given.items()})


@dataclass
class Halves:
    """A graph, its text before it was cut, and its two parts."""

    whole: Graph
    before: str
    first: Graph
    second: Graph


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((deep(nn.BatchNorm1d(WIDTH)), (4, WIDTH)), id="norm"),
        pytest.param((deep(nn.Dropout(0.5)), (4, WIDTH)), id="dropout"),
        pytest.param((attending(), (2, 8, 128)), id="attention"),
    ],
)
def halves(request: pytest.FixtureRequest) -> Halves:
    module, shape = request.param
    whole = captured(module, *shape)
    before = str(whole.module.graph)
    parts = early(whole, 2, LINK)
    assert parts is not None
    return Halves(whole, before, *parts)


def test_cutting_leaves_the_whole_as_it_was(halves: Halves) -> None:
    assert str(halves.whole.module.graph) == halves.before


def test_both_parts_are_valid_graphs_with_operators(halves: Halves) -> None:
    for part in (halves.first, halves.second):
        verify.verify_graph(part)
        assert len(list(part.operators)) > 0


def test_both_parts_together_compute_the_same_bits_as_the_whole(halves: Halves) -> None:
    given = {slot.key: torch.rand(slot.shape).to(slot.dtype) for slot in halves.whole.inputs}
    expected = run(halves.whole, given)

    made = run(halves.first, given)
    changed = {key: made[key] for key in halves.first.updates}
    made |= halves.second(given | changed | made)

    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, rtol=0, atol=0, msg=key)
    handed = values_of(halves.first.outputs)
    assert made.keys() - expected.keys() == handed
    assert all(made[key].is_contiguous() for key in handed)


def test_the_second_part_reads_the_values_that_the_first_part_returns(halves: Halves) -> None:
    assert values_of(halves.second.inputs) == values_of(halves.first.outputs)


def test_every_gradient_is_made_by_one_of_the_parts(halves: Halves) -> None:
    first, second = gradients(halves.first), gradients(halves.second)

    assert first
    assert first.isdisjoint(second)
    assert first | second == gradients(halves.whole)


LAYERS = {"0", "2", "4", "6"}
"""Numbers of the linear layers."""


@pytest.mark.parametrize("bandwidth, late", [(1e10, {"4", "6"}), (1e9, {"6"})])
def test_on_a_slower_link_gradients_of_late_layers_are_sent_earlier(
    bandwidth: float, late: set[str]
) -> None:
    whole = captured(deep(), 4, WIDTH)

    parts = early(whole, 2, replace(LINK, bandwidth=bandwidth))

    assert parts is not None
    first, second = ({path.split(".")[1] for path in gradients(part)} for part in parts)
    assert first == late
    assert second == LAYERS - late


@pytest.mark.parametrize(
    "fast",
    [replace(LINK, bandwidth=1e12), replace(LINK, waking=1e-4), Link(0.0, 1e10)],
    ids=["a fast link", "a thread that wakes slowly", "copies that take time"],
)
def test_nothing_is_cut_if_that_saves_no_time(fast: Link) -> None:
    assert early(captured(deep(), 4, WIDTH), 2, fast) is None


def test_nothing_is_cut_if_the_second_part_draws() -> None:
    """The second part would draw other numbers, because each run of a graph begins its own
    sequence.
    """
    noisy = deep()

    def add_noise_to_gradient(_layer: nn.Module, _x: object, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: gradient + torch.rand_like(gradient))

    noisy.layers[0].register_forward_hook(add_noise_to_gradient)

    assert early(captured(noisy, 4, WIDTH), 2, LINK) is None
