"""Products of groups of rows with matrices of their own, as mixtures of experts need them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .library import define

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, None]


def _groups(ends: torch.Tensor) -> list[slice]:
    marks = [0, *ends.tolist()]
    return [slice(start, end) for start, end in itertools.pairwise(marks)]


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result = a.new_zeros(_shape(a, b, ends))
    for at, rows in enumerate(_groups(ends)):
        if a.dim() == 2 and b.dim() == 3:
            result[rows] = a[rows] @ b[at]
        elif a.dim() == 3:
            result[:, rows] = a[at] @ b[:, rows]
        else:
            result[at] = a[:, rows] @ b[rows]
    return result


def _shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    groups = (ends.shape[0],) if a.dim() == b.dim() else ()
    return (*groups, a.shape[-2], b.shape[-1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
    a, b, ends = ctx.saved_tensors
    of_a, of_b, _ = ctx.needs_input_grad
    return (
        grouped_product(gradient, b.mT, ends) if of_a else None,
        grouped_product(a.mT, gradient, ends) if of_b else None,
        None,
    )


grouped_product = define(
    "grouped_product",
    "(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _product,
    lambda a, b, ends: a.new_empty(_shape(a, b, ends)),
    backward=_backward,
    setup_context=_keep,
)
"""Rows of ``a``, columns of ``b`` or what is summed over, in groups that end at ``ends``.

Args:
    a: (rows, inner), or (groups, rows, inner).
    b: (groups, inner, columns), or (inner, columns).
    ends: (groups), the place after the last of each group, ascending.

Returns:
    (rows, columns), zero in rows and columns of no group; (groups, rows, columns) of two matrices.
"""
