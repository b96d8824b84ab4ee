"""Operators of a graph know the lines that they come from."""

import inspect
import linecache

import torch
from torch import nn
from torch.fx import graph_module

import poptorch
from helpers.wrapping import graph_of, options


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

    kept = {*graph_module._loader.eval_cache, *linecache.cache}
    wrapped = poptorch.inferenceModel(Outer(), options())
    wrapped(torch.ones(3))
    new = {*graph_module._loader.eval_cache, *linecache.cache} - kept
    assert not [name for name in new if name.startswith("<eval_with_key>")]  # generated code
    add, mul = (n.stack_trace for n in graph_of(wrapped).nodes if n.op == "call_function")
    outer = f'File "{__file__}", line {_line_of(Outer)}, in forward\n    return self.inner(x + 1)'
    inner = f'File "{__file__}", line {_line_of(Inner)}, in forward\n    return helper(x)'
    assert add == outer
    assert mul == f"{outer}\n  {inner}"


def _line_of(model: type[nn.Module]) -> int:
    """Return where the last line of a model's forward is."""
    lines, first = inspect.getsourcelines(model.forward)
    return first + len(lines) - 1
