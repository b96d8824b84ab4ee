"""A matrix product that is computed piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .library import define

ROWS, REDUCED, COLUMNS = "input_channels", "reducing_dim", "output_channels"

# Which dimension is cut in the products of the backward pass: of the gradient with the transposed
# right operand, and of the transposed left operand with the gradient.
_FOR_LEFT = {ROWS: ROWS, REDUCED: COLUMNS, COLUMNS: REDUCED}
_FOR_RIGHT = {ROWS: REDUCED, REDUCED: ROWS, COLUMNS: COLUMNS}
_HALVES = (torch.float16, torch.bfloat16)


def _product(
    lhs: torch.Tensor, rhs: torch.Tensor, cut: str, factor: int, exact: bool
) -> torch.Tensor:
    if rhs.dim() == 2 and lhs.dim() > 2:
        return _product(lhs.flatten(0, -2), rhs, cut, factor, exact).view(_shape(lhs, rhs))
    out = _fake(lhs, rhs)
    widened = exact and lhs.dtype in _HALVES
    if cut == REDUCED and widened:
        return _sum(out.float(), lhs, rhs, factor, torch.Tensor.float).to(lhs.dtype)
    if cut == REDUCED:
        return _sum(out, lhs, rhs, factor, lambda part: part)
    for place, left, right in _pieces(out, lhs, rhs, cut, factor):
        place.copy_(left.float() @ right.float() if widened else left @ right)
    return out


def _sum(
    total: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    factor: int,
    widened: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    total.zero_()
    for left, right in zip(_cut(lhs, factor, -1), _cut(rhs, factor, -2), strict=True):
        total += widened(left) @ widened(right)
    return total


def _pieces(
    out: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, cut: str, factor: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if cut == ROWS:
        for place, left in zip(_cut(out, factor, -2), _cut(lhs, factor, -2), strict=True):
            yield place, left, rhs
    else:
        for place, right in zip(_cut(out, factor, -1), _cut(rhs, factor, -1), strict=True):
            yield place, lhs, right


def _cut(tensor: torch.Tensor, factor: int, dim: int) -> tuple[torch.Tensor, ...]:
    return tensor.tensor_split(factor, dim)


def _shape(lhs: torch.Tensor, rhs: torch.Tensor) -> tuple[int, ...]:
    batch = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])  # type: ignore[no-untyped-call]
    return (*batch, lhs.shape[-2], rhs.shape[-1])


def _fake(lhs: torch.Tensor, rhs: torch.Tensor, *_: Any) -> torch.Tensor:
    return lhs.new_empty(_shape(lhs, rhs))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    lhs, rhs, *ctx.settings = inputs
    ctx.save_for_backward(lhs, rhs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    lhs, rhs = ctx.saved_tensors
    cut, *rest = ctx.settings
    left = right = None
    if ctx.needs_input_grad[0]:
        left = _summed(gradient, rhs.mT, lhs.shape, _FOR_LEFT[cut], *rest)
    if ctx.needs_input_grad[1]:
        right = _summed(lhs.mT, gradient, rhs.shape, _FOR_RIGHT[cut], *rest)
    return left, right, None, None, None


def _summed(
    lhs: torch.Tensor, rhs: torch.Tensor, shape: torch.Size, cut: str, factor: int, exact: bool
) -> torch.Tensor:
    """A product summed over the dimensions of the batch that a shape lacks."""
    batch = _shape(lhs, rhs)[:-2]
    wanted = (*[1] * (len(batch) - len(shape) + 2), *shape[:-2])
    summed = [at for at, size in enumerate(batch) if wanted[at] < size]
    kept = [at for at in range(len(batch)) if at not in summed]
    row, column = len(batch), len(batch) + 1
    if summed:
        lhs = (
            _with_rank(lhs, column + 1).permute(*kept, row, *summed, column).flatten(len(kept) + 1)
        )
        rhs = _with_rank(rhs, column + 1).permute(*kept, *summed, row, column)
        rhs = rhs.flatten(len(kept), -2)
    result: torch.Tensor = serialized_matmul(lhs, rhs, cut, factor, exact)
    return result.reshape(shape)


def _with_rank(operand: torch.Tensor, rank: int) -> torch.Tensor:
    return operand.reshape(*[1] * (rank - operand.dim()), *operand.shape)


def _lanes(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[torch.Tensor, int]:
    """Lanes are one more dimension of the batch."""
    (lhs, rhs, *settings), (at_left, at_right) = args, in_dims[:2]
    ranks = [t.dim() - (dim is not None) for t, dim in ((lhs, at_left), (rhs, at_right))]
    lhs, rhs = (
        operand if dim is None else _lane_first(operand.movedim(dim, 0), max(ranks))
        for operand, dim in ((lhs, at_left), (rhs, at_right))
    )
    return serialized_matmul(lhs, rhs, *settings), 0


def _lane_first(operand: torch.Tensor, rank: int) -> torch.Tensor:
    lanes, *shape = operand.shape
    return operand.reshape(lanes, *[1] * (rank - len(shape)), *shape)


serialized_matmul = define(
    "serialized_matmul",
    "(Tensor lhs, Tensor rhs, str cut, int factor, bool exact) -> Tensor",
    _product,
    _fake,
    backward=_backward,
    setup_context=_remember,
    vmap=_lanes,
)
