"""The walks of ARCHITECTURE.md: their stops exist and run in that order."""

import re
import sys

import pytest
import torch

import poptorch
from helpers.source_tree import PACKAGE, ROOT
from helpers.wrapping import Having, Scaled, options, training

Stop = tuple[str, str]  # file, qualified name
STOP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", re.M)
X, Y = torch.ones(4, 3), torch.ones(4, 2)


def walks() -> dict[str, list[Stop]]:
    """Return the stops of each walk, by the words that it begins with."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("\n## Three walks\n")[2].partition("\n## ")[0]
    titles = re.split(r"^\*\*(.*?)\*\*", section, flags=re.M)[1:]
    return dict(zip(titles[::2], map(STOP.findall, titles[1::2]), strict=True))


def model() -> torch.nn.Module:
    def forward(own, x, y):
        with poptorch.Block("a", ipu_id=0):
            x = own.first(x)
        with poptorch.Block("b", ipu_id=1):
            return torch.nn.functional.mse_loss(own.second(x), y)

    return Having(forward, first=torch.nn.Linear(3, 3), second=torch.nn.Linear(3, 2))


def called(action):
    """Yield the package's own functions in the order in which an action calls them."""
    calls: list[Stop] = []
    prefix = f"{PACKAGE}/"

    def note(frame, event: str, _) -> None:
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


def a_call():
    wrapped = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())
    wrapped(X)
    return lambda: wrapped(X.clone())


def a_changed_rate() -> None:
    net = Scaled(lambda x, y: x - y.sum())
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(net, options(), optimizer)
    wrapped(X, Y)
    optimizer.param_groups[0]["lr"] = 0.2
    wrapped.setOptimizer(optimizer)
    wrapped(X, Y)


def a_placed_model() -> None:
    opts = options("staged")
    opts.setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage("a"), poptorch.Stage("b")))
    training(model(), opts)(X, Y)


ACTIONS = {"An input tensor": a_call, "A learning rate": lambda: a_changed_rate,
           "A block's id": lambda: a_placed_model}  # fmt: skip


@pytest.mark.parametrize("title", ACTIONS)
def test_the_stops_of_a_walk_run_in_its_order(title: str) -> None:
    assert walks().keys() == ACTIONS.keys()
    stops = walks()[title]
    assert 1 < len(stops) <= 10
    calls = called(ACTIONS[title]())
    for stop in stops:
        assert stop in calls, f"{stop} is not called, or not after the stops before it"
