"""Graphs to compile, and comparisons with the traced graphs, for tests of that backend."""

from collections.abc import Callable

import torch

from poptorch._capture.trace import fake_mode, fake_tensor, trace
from poptorch._cpu.compiled_code import load
from poptorch._cpu.compiler import compile_graph
from poptorch._ir import slots
from poptorch._ir.slots import Slot
from poptorch._ir.symbolic import Symbols, settle, with_example_sizes
from poptorch.backends.prepare import write_last
from poptorch.backends.protocol import Code

Tensors = list[torch.Tensor]
Step = Callable[..., tuple[Tensors, Tensors]]


def graph(step: Step, examples: Tensors) -> tuple[torch.fx.GraphModule, range]:
    """Trace a step that returns (outputs, new values of its first inputs); and name these."""
    outputs = 0

    def flat(args: Tensors) -> Tensors:
        nonlocal outputs
        returned, new = step(*args)
        outputs = len(returned)
        return [*returned, *new]

    mode = fake_mode()
    module, constants = trace(flat, [fake_tensor(mode, t.shape, t.dtype) for t in examples])
    assert not constants
    (output,) = module.graph.find_nodes(op="output")
    return module, range(len(output.args[0]) - outputs)


def graph_for_many_sizes(
    step: Step, examples: Tensors, dim: int
) -> tuple[torch.fx.GraphModule, range, tuple[Slot, ...]]:
    """Trace like ``graph``, with a symbolic size for a dimension of the last input.

    Return the slots of the inputs, too.
    """
    outputs = 0

    def flat(args: Tensors) -> Tensors:
        nonlocal outputs
        returned, new = step(*args)
        outputs = len(returned)
        return [*returned, *new]

    names = [("",) * each.dim() for each in examples]
    names[-1] = tuple("s0" if at == dim else "" for at in range(examples[-1].dim()))
    given = [
        slots.batch_input(at, tuple(each.shape), each.dtype, symbols)
        for at, (each, symbols) in enumerate(zip(examples, names, strict=True))
    ]
    symbols = Symbols({"s0": examples[-1].shape[dim]})
    module, _ = trace(flat, [symbols.tensor(slot) for slot in given])
    settle(module, given, symbols)
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    places = range(len(output.args[0]) - outputs)
    return module, places, with_example_sizes(given, placeholders)


def check(step: Callable[..., tuple[Tensors, Tensors]], examples: Tensors) -> Code:
    """Compile and run a graph and its stored form; compare all results with the traced graph."""
    module, places = graph(step, examples)
    text, code = module.print_readable(print_output=False), compile_graph(module, places, examples)
    assert module.print_readable(print_output=False) == text
    write_last(module, places)
    expected_state, got_state = [[t.clone() for t in examples] for _ in range(2)]
    for seed, run in enumerate((code.run, load(code.kept) if code.kept else code.run)):
        torch.manual_seed(seed)
        expected_value = module(*expected_state)
        torch.manual_seed(seed)
        arguments = list(got_state)
        got = run(arguments)
        assert len(arguments) == len(examples)
        for a, b in zip([*expected_value, *expected_state], [*got, *got_state], strict=True):
            torch.testing.assert_close(b, a)
            assert b.stride() == a.stride()
        for a, b in zip(expected_state, got_state, strict=True):
            b.copy_(a)  # rounding of this run must not be compared with the precision of float64
    return code
