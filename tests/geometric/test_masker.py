"""Maskers hide padding from layers."""

import pytest
import torch

from poptorch_geometric.masker import LayerMasker, Masker, NoMasker, PreLayerMasker

NAMES = ("node_masker", "edge_masker", "graph_masker")


@pytest.mark.spec("geometric", 92)
@pytest.mark.parametrize("name", NAMES)
def test_no_masker_returns_the_object_it_was_given(name: str) -> None:
    entries = (torch.ones(2), torch.zeros(2))

    masked = getattr(NoMasker(), name)(entries, torch.ones(2))

    assert masked is entries


@pytest.mark.spec("geometric", 92)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_behind_no_masker_computes_the_same_as_before(name: str) -> None:
    layer = getattr(PreLayerMasker(NoMasker()), name)(torch.add)

    out = layer(torch.ones(2), torch.zeros(2), mask=None)

    assert out.tolist() == [1.0, 1.0]


def test_a_masker_is_applied_before_the_layer() -> None:
    class Zeroing(NoMasker):
        def node_masker(
            self, entries: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ...]:
            return tuple(entry * mask for entry in entries)

    layer = PreLayerMasker(Zeroing()).node_masker(torch.nn.Linear(2, 2, bias=False))

    assert layer(torch.ones(2), mask=torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "abstract, arguments",
    [(Masker, ()), (LayerMasker, (NoMasker(),))],
    ids=["Masker", "LayerMasker"],
)
def test_an_abstract_masker_cannot_be_made(abstract: type, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        abstract(*arguments)
