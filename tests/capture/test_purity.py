"""The second pass of tracing: left out where it would change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.wrapping import Having, training
from poptorch._capture import purity

X, Y = torch.randn(4, 3), torch.randint(3, (4,))


def net(*layers: nn.Module) -> Having:
    return Having(
        lambda model, x, y: nn.functional.cross_entropy(model.layers(x), y),
        layers=nn.Sequential(nn.Linear(3, 3), *layers),
    )


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
    "layers, dtype, priced, step, update",
    [
        ((), torch.float32, False, False, False),
        ((nn.Dropout(0.5),), torch.float32, False, False, False),
        ((nn.BatchNorm1d(3),), torch.float32, False, True, False),
        ((nn.ReLU(inplace=True),), torch.float32, False, True, False),
        ((), torch.float16, False, True, True),  # computed in single precision
        ((), torch.float16, True, False, False),
    ],
)
def test_graphs_that_write_are_replayed(layers, dtype, priced, step, update, replayed) -> None:
    model, x = training(net(*layers).to(dtype)), X.to(dtype)
    model.estimate(x, Y, system="bow:1") if priced else model(x, Y)
    assert (replayed[0], any(replayed[1:])) == (step, update)
