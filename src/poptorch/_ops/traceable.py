"""Provide traceable forms of torch's operators: one node, whose results have known shapes."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .library import copied, define

aten = torch.ops.aten


def _ctc(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, workspace = aten._ctc_loss.Tensor(*args)
    gradient = aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), *args[:4], losses, workspace, *args[4:]
    )
    if args[-1]:  # ``zero_infinity``: torch's operator leaves this to its caller
        losses = losses.masked_fill(losses.isinf(), 0.0)
    return losses, gradient.contiguous()


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(ctx: Any, outer: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    return outer[:, None] * gradient, None, None, None, None, None


# The gradient of each sample's loss is computed together with the loss.
ctc_losses = define(
    "ctc_losses",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)",
    _ctc,
    lambda x, *_: (x.new_empty(x.shape[1]), x.new_empty(x.shape)),
    backward=_ctc_backward,
    setup_context=_keep_gradient,
)

# Torch knows the shapes of grouped products only for bfloat16, and requires rows that start at
# multiples of 16 bytes. The number of rows in a group is known only when the program runs.


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result = a.new_zeros(_grouped_shape(a, b, ends))
    groups = itertools.pairwise([0, *ends.tolist()])
    for at, rows in enumerate(itertools.starmap(slice, groups)):
        if a.dim() == 2 and b.dim() == 3:
            result[rows] = a[rows] @ b[at]
        elif a.dim() == 3:
            result[:, rows] = a[at] @ b[:, rows]
        else:
            result[at] = a[:, rows] @ b[rows]
    return result


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    groups = (ends.shape[0],) if a.dim() == b.dim() else ()
    return (*groups, a.shape[-2], b.shape[-1])


def _grouped_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
    lambda a, b, ends: a.new_empty(_grouped_shape(a, b, ends)),
    backward=_grouped_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
"""Groups end at ``ends``, ascending. They are groups of rows of ``a``, of columns of ``b``, or of
the summed dimension.

(rows, inner) or (groups, rows, inner) with (groups, inner, columns) or (inner, columns) give (rows,
columns), which is zero outside of groups. Two matrices give (groups, rows, columns).
"""


def _within(x: torch.Tensor, least: float, most: float, zero: bool, what: str) -> torch.Tensor:
    if x.numel():
        low, high = (extreme.item() for extreme in torch.aminmax(x))
        if not (least <= low and high <= most):  # also catches NaN
            raise IndexError(f"{what}: {low} to {high} is out of range, {least:g} to {most:g}")
        if not zero and not x.all():
            raise RuntimeError(f"ZeroDivisionError in {what}")
    return copied(x)


within = define(
    "within",
    "(Tensor x, float least, float most, bool zero, str what) -> Tensor",
    _within,
    lambda x, *_: copied(x),
)
