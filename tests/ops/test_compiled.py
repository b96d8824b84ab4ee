"""Operators of ours in compiled code: what the interpreter makes of them, in its order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Scaled, options, runs_compiled, training
from ops import test_control
from ops.test_debug import show, titles

pytestmark = pytest.mark.slow


class Control(nn.Module):
    """Nested loops and nested conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.looped, self.conditions = test_control.LoopedLayer(), test_control.Conditions()

    def forward(self, x, y, z):
        return self.looped(z, x * 1, y), self.conditions(x, y)


def test_control_flow_is_that_of_python() -> None:
    model, z = Control(), torch.randn(4, 3)
    wrapped = poptorch.inferenceModel(model, options("inductor"))
    for a, b in itertools.product((1.0, -0.5, -3.0), (1.0, -1.0)):
        given = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b]), z
        got = wrapped(*given)
        with torch.no_grad():
            torch.testing.assert_close(got, model(*given))
    assert runs_compiled(wrapped)


def test_prints_and_host_calls_keep_their_order(capfd) -> None:
    """Inductor may move operators; effects stay where the program has them."""
    log = []

    def doubled(x):
        log.append(x.tolist())
        return x.view(-1, 1).expand(-1, 3).T * 2  # lies in memory in another order

    cpu = poptorch.CPU(doubled, "Doubled")

    def forward(x):
        x = show(cpu(show(x, "before") + 1).sum(0) / 3, "between")
        (x,) = poptorch.for_loop(3, lambda a: show(a + 1, "in"), [x])
        return show(x, "after")

    model = poptorch.inferenceModel(Calling(forward), options("inductor", iterations=2))
    assert model(torch.tensor([1.0, 2.0])).tolist() == [7.0, 9.0]
    assert runs_compiled(model)
    assert log == [[0.0], [2.0], [3.0]]  # with zeros when captured, once per execution
    written = capfd.readouterr().err.splitlines()
    lines = [line.replace(".0000", "") for line in written if line[0] != "["]  # that is the log
    assert lines == [
        *("before: (1)", "between: (4)", "in: (5)", "in: (6)", "in: (7)", "after: (7)"),
        *("before: (2)", "between: (6)", "in: (7)", "in: (8)", "in: (9)", "after: (9)"),
    ]


def test_prints_in_training_keep_their_order(capfd) -> None:
    def forward(x):
        first = show(x.sum(), "first")
        second = show((x * x).sum(), "second")
        third = show(torch.full((1,), 7.0), "third", False)
        return third + second * 0 + first

    model = training(Scaled(forward), options("inductor", accumulation=2))
    model(torch.ones(4))
    model(torch.ones(4))
    once = ["first", "second", "third", "second_gradient", "first_gradient"]
    assert titles(capfd.readouterr().err) == once * 4
