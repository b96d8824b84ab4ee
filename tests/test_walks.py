"""The walks of ARCHITECTURE.md: their stops exist and run in that order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.source_tree import PACKAGE, ROOT
from helpers.wrapping import options, training

Stop = tuple[str, str]  # file, qualified name
STOP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", re.M)
X, Y = torch.ones(4, 3), torch.ones(4, 2)


def walks() -> dict[str, list[Stop]]:
    """Return the stops of each walk, by the words that it begins with."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("\n## Three walks\n")[2].partition("\n## ")[0]
    titles = re.split(r"^\*\*(.*?)\*\*", section, flags=re.M)[1:]
    return dict(zip(titles[::2], map(STOP.findall, titles[1::2]), strict=True))


class Model(nn.Module):
    """Two blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, y):
        with poptorch.Block("a", ipu_id=0):
            x = self.first(x)
        with poptorch.Block("b", ipu_id=1):
            out = self.second(x)
            return out, nn.functional.mse_loss(out, y)


def called(action: Callable[[], Any]) -> Iterator[Stop]:
    """Yield the package's own functions in the order in which an action calls them."""
    calls: list[Stop] = []
    prefix = f"{PACKAGE}/"

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            calls.append((code.co_filename.removeprefix(prefix), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    yield from calls


def a_call() -> Callable[[], Any]:
    model = poptorch.inferenceModel(nn.Linear(3, 2), options())
    model(X)
    return lambda: model(X.clone())


def a_changed_rate() -> None:
    net = Model()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    opts = options().autoRoundNumIPUs(True)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    model = poptorch.trainingModel(net, opts, optimizer)
    model(X, Y)
    optimizer.param_groups[0]["lr"] = 0.2
    model.setOptimizer(optimizer)
    model(X, Y)


def a_placed_model() -> None:
    opts = options("staged")
    opts.setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage("a"), poptorch.Stage("b")))
    training(Model(), opts)(X, Y)


ACTIONS = {
    "An input tensor": a_call,
    "A learning rate": lambda: a_changed_rate,
    "A block's id": lambda: a_placed_model,
}


@pytest.mark.parametrize("title", ACTIONS)
def test_the_stops_of_a_walk_run_in_its_order(title: str) -> None:
    assert walks().keys() == ACTIONS.keys()
    stops = walks()[title]
    assert 1 < len(stops) <= 10
    calls = called(ACTIONS[title]())
    for stop in stops:
        assert stop in calls, f"{stop} is not called, or not after the stops before it"
