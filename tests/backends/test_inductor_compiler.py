"""The compiled graph does what the traced one does: values, writes, strides, random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

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


def test_training_step_with_state_and_random_numbers() -> None:
    x = torch.randn(4, 6)

    def step(w: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        leaf = w.detach().requires_grad_()
        out = F.dropout(x @ leaf, 0.5)
        (grad,) = torch.autograd.grad(
            F.cross_entropy(out, torch.zeros_like(out[:, 0]).long()), leaf
        )
        new = momentum * 0.9 + grad
        return [out.detach(), out.detach().t()], [w - 0.1 * new, new]

    check(step, [torch.randn(6, 3), torch.zeros(6, 3), x])


def test_factors_of_additions_survive_next_to_matrix_products() -> None:
    """torch 2.13's generator drops ``alpha`` where it makes ``addmm`` of an addition."""

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[Tensors, Tensors]:
        first, second = torch.mm(a, b), torch.mm(a * 2, b)  # each with one user, so that it fuses
        return [torch.add(x, first, alpha=0.5), torch.add(second, x, alpha=0.25)], []

    examples = [torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3)]
    got = compile_graph(graph(step, examples), examples).run(examples)
    torch.testing.assert_close(list(got), step(*examples)[0])
