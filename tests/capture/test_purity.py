"""The second pass of tracing: left out where it would change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.wrapping import options, training
from poptorch._capture import purity

X, Y = torch.randn(4, 3), torch.randint(3, (4,))


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), *layers)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.layers(x), y)


@pytest.fixture
def replayed(monkeypatch) -> list[bool]:
    """Whether the second pass replayed each graph that was traced."""
    done: list[bool] = []
    pure, replay = purity.pure, purity._functionalize

    def tell(*args):
        done.append(False)
        return pure(*args)

    def also(*args):
        done[-1] = True
        return replay(*args)

    monkeypatch.setattr(purity, "pure", tell)
    monkeypatch.setattr(purity, "_functionalize", also)
    return done


@pytest.mark.parametrize(
    "layers, first",
    [
        ((), False),
        ((nn.Dropout(0.5),), False),
        ((nn.BatchNorm1d(3),), True),
        ((nn.ReLU(inplace=True),), True),
    ],
    ids=["nothing", "dropout", "batch norm", "in place"],
)
def test_graphs_that_write_are_replayed(layers, first: bool, replayed: list[bool]) -> None:
    training(Net(*layers), options())(X, Y)
    assert replayed[0] is first
    assert not any(replayed[1:])  # the update writes nothing


def test_half_is_computed_in_single_precision(replayed: list[bool]) -> None:
    training(Net().half(), options())(X.half(), Y)
    assert replayed[0]


def test_half_that_is_only_priced_stays(replayed: list[bool]) -> None:
    training(Net().half(), options()).estimate(X.half(), Y, system="bow:1")
    assert replayed
    assert not any(replayed)


@pytest.mark.parametrize("layers", [(), (nn.Dropout(0.5),)], ids=["nothing", "dropout"])
def test_a_replayed_graph_is_the_one_that_was_taken(layers, monkeypatch) -> None:
    """Both ways from one recording: the same operators in the same order."""

    def names() -> list[str]:
        torch.manual_seed(0)
        executor = training(Net(*layers), options())
        executor(X, Y)
        graphs = executor._session.now.compiled.plan.program.graphs.values()
        return [str(node.target) for graph in graphs for node in graph.module.graph.nodes]

    taken = names()
    monkeypatch.setattr(purity, "_is_pure", lambda *_: False)
    monkeypatch.setattr(purity, "_make_lone_writes_pure", lambda _: None)
    assert names() == taken
