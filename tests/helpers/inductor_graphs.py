"""Graphs to compile, and their results beside the traced ones. For tests of that backend."""

from collections.abc import Callable

import torch

from poptorch._capture.trace import fake_mode, fake_tensor, trace
from poptorch.backends.inductor.compiler import compile_graph

aten = torch.ops.aten
Tensors = list[torch.Tensor]


def graph(step: Callable[..., tuple[Tensors, Tensors]], examples: Tensors) -> torch.fx.GraphModule:
    """Trace a step that returns (outputs, new values of its first inputs) into a prepared graph."""
    outputs = 0

    def flat(args: Tensors) -> Tensors:
        nonlocal outputs
        returned, new = step(*args)
        outputs = len(returned)
        return [*returned, *new]

    mode = fake_mode()
    module, constants = trace(flat, [fake_tensor(mode, t.shape, t.dtype) for t in examples])
    assert not constants
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    values = output.args[0]
    with module.graph.inserting_before(output):
        for place, value in zip(placeholders, values[outputs:], strict=False):
            module.graph.call_function(aten.copy_.default, (place, value))
    output.args = (tuple(values[:outputs]),)
    module.recompile()
    return module


def check(step: Callable[..., tuple[Tensors, Tensors]], examples: Tensors) -> None:
    """Compile, run twice beside the traced graph, compare everything that can be seen."""
    module = graph(step, examples)
    text = module.print_readable(print_output=False)
    compiled = compile_graph(module, examples).run
    assert module.print_readable(print_output=False) == text
    want_state, got_state = [[t.clone() for t in examples] for _ in range(2)]
    for seed in range(2):
        torch.manual_seed(seed)
        want = module(*want_state)
        torch.manual_seed(seed)
        arguments = list(got_state)
        got = compiled(arguments)
        assert len(arguments) == len(examples)
        for a, b in zip([*want, *want_state], [*got, *got_state], strict=True):
            torch.testing.assert_close(b, a)
            assert b.stride() == a.stride()
