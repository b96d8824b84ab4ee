"""The compiled graph does what the traced one does: values, writes, strides, random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.inductor_graphs import Tensors, check, graph
from poptorch.backends.inductor.compiler import compile_graph

pytestmark = pytest.mark.slow


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
