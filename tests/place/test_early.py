"""A micro graph in two: what both parts compute, and when there are two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import capture
from poptorch._ir import verify
from poptorch._ir.graph import Graph
from poptorch._ir.slots import Kind
from poptorch._place import early

LARGE = 300


class Deep(nn.Module):
    """Layers of one size, one after another.

    Args:
        between: follows each.
    """

    def __init__(self, *between: nn.Module, size: int = LARGE) -> None:
        super().__init__()
        layers = (layer for _ in range(4) for layer in (nn.Linear(size, size), nn.Tanh(), *between))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, poptorch.identity_loss(out.square(), "mean")


class Attending(nn.Module):
    """Whose attention makes tensors that do not lie as their dimensions say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 2, 256, 0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x, poptorch.identity_loss(x.square() * torch.arange(128.0), "mean")


def captured(module: nn.Module, *inputs: torch.Tensor) -> Graph:
    torch.manual_seed(3)
    return capture(module, *inputs, training=True).graph


def values(graph: Graph) -> dict[str, torch.Tensor]:
    """Return random values for all inputs."""
    generator = torch.Generator().manual_seed(3)
    return {
        slot.key: torch.rand(slot.shape, generator=generator).to(slot.dtype)
        for slot in graph.inputs
    }


def gradients(graph: Graph) -> set[str]:
    return {slot.path for slot in graph.outputs if slot.kind is Kind.GRADIENT}


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Deep(), (4, LARGE)),
        (Deep(nn.BatchNorm1d(LARGE)), (4, LARGE)),
        (Deep(nn.Dropout(0.5)), (4, LARGE)),
        (Attending(), (2, 8, 128)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_both_parts_compute_what_the_whole_does(module: nn.Module, shape: tuple[int, ...]) -> None:
    whole = captured(module, torch.ones(shape))
    parts = early(whole)
    assert parts is not None
    first, second = parts
    given = values(whole)
    torch.manual_seed(5)
    expected = whole({key: value.clone() for key, value in given.items()})
    torch.manual_seed(5)
    made = first({key: value.clone() for key, value in given.items()})
    # What the first part changes is changed when the second one reads it.
    changed = {key: made[key] for key in first.updates}
    made |= second(given | changed | made)
    assert {k for k in made if not k.startswith("value.")} == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, rtol=0, atol=0, msg=key)
    assert gradients(first)
    assert gradients(first).isdisjoint(gradients(second))
    assert gradients(first) | gradients(second) == gradients(whole)
    handed = {slot.key for slot in first.outputs if slot.kind is Kind.VALUE}
    assert handed == {slot.key for slot in second.inputs if slot.kind is Kind.VALUE}
    assert all(made[key].is_contiguous() for key in handed)
    for part in parts:
        verify.verify_graph(part)


def test_the_graph_that_is_cut_stays_as_it_is() -> None:
    whole = captured(Attending(), torch.ones(2, 8, 128))
    before = str(whole.module.graph)
    assert early(whole) is not None
    assert str(whole.module.graph) == before


def test_late_layers_come_first_and_early_ones_leave_work() -> None:
    parts = early(captured(Deep(), torch.ones(4, LARGE)))
    assert parts is not None
    names = [{path.split(".")[1] for path in gradients(part)} for part in parts]
    assert names == [{"4", "6"}, {"0", "2"}]


def test_small_models_stay_whole() -> None:
    assert early(captured(Deep(size=30), torch.ones(4, 30))) is None


def test_what_would_draw_in_the_second_part_stays_whole() -> None:
    """Its draws would be others: each run of a graph begins a sequence of its own."""

    class Noisy(Deep):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.layers[0](x)
            first.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
            out = self.layers[1:](first)
            return out, poptorch.identity_loss(out.square(), "mean")

    assert early(captured(Noisy(), torch.ones(4, LARGE))) is None
