"""Compiling leaves no text of generated code behind, and takes none away; lines are noted."""

from __future__ import annotations

import inspect
import linecache

import torch
from torch import fx, nn
from torch.fx import graph_module

import poptorch
from helpers.wrapping import graph_of, options


def kept() -> list[str]:
    """Names of generated code whose text torch and Python keep."""
    lines = [name for name in linecache.cache if name.startswith("<eval_with_key>")]
    return [*graph_module._loader.eval_cache, *lines]


def test_wrapping_models_keeps_nothing() -> None:
    mine = fx.symbolic_trace(nn.Linear(2, 2))
    before = kept()
    assert mine.forward.__code__.co_filename in before
    model = nn.Linear(2, 2)
    training = poptorch.trainingModel(model, options(accumulation=2), loss=nn.MSELoss())
    training(torch.ones(4, 2), torch.ones(4, 2))
    training.plan()
    training.explain(torch.ones(4, 2), torch.ones(4, 2))
    poptorch.inferenceModel(model, options())(torch.ones(4, 2))
    assert kept() == before


def test_nodes_know_the_lines_of_forward_and_no_others() -> None:
    """Of the user's own forwards, outermost first; of no function that these call."""

    class Inner(nn.Module):
        def forward(self, x):
            return helper(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Inner())

        def forward(self, x):
            return self.inner(x + 1)

    def helper(x):
        return x * 2

    wrapped = poptorch.inferenceModel(Outer(), options())
    wrapped(torch.ones(3))
    add, mul = (n.stack_trace for n in graph_of(wrapped).nodes if n.op == "call_function")
    outer = f'File "{__file__}", line {_line_of(Outer)}, in forward\n    return self.inner(x + 1)'
    inner = f'File "{__file__}", line {_line_of(Inner)}, in forward\n    return helper(x)'
    assert add == outer
    assert mul == f"{outer}\n  {inner}"


def _line_of(model: type[nn.Module]) -> int:
    """Return where the last line of a model's forward is."""
    lines, first = inspect.getsourcelines(model.forward)
    return first + len(lines) - 1
