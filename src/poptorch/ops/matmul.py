"""Compute a matrix product piece by piece into one result, so that only one piece needs temporary
memory.
"""

from __future__ import annotations

from typing import Any

import torch

from .._base.errors import AssertionFailure
from .._ir.slots import HALF_TYPES
from .._ops.context import listener
from .._ops.library import define
from ..enums import MatMulSerializationMode
from . import operand_checks

_ROWS, _REDUCED, _COLUMNS = "input_channels", "reducing_dim", "output_channels"
_DIMENSIONS = {_ROWS: "rows of lhs", _REDUCED: "columns of lhs", _COLUMNS: "columns of rhs"}


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Compute ``torch.matmul`` in pieces, one after another, for less temporary memory.

    In a wrapped model the product and its gradients are computed piece by piece. Outside one this
    is ``torch.matmul``.

    Args:
        lhs: m x n, or a batch of such matrices, as for ``torch.matmul``.
        rhs: n x p.
        mode: which dimension to cut: ``InputChannels`` m, ``ReducingDim`` n, ``OutputChannels`` p.
        factor: how many pieces; 0 and 1 for one.
        keep_precision: multiply half precision operands, and add pieces, in float32.

    Raises:
        AssertionError: an argument has the wrong type.
        poptorch.Error: in a wrapped model, if the factor does not divide the dimension.
    """
    _check_type(mode, "mode", MatMulSerializationMode)
    _check_type(factor, "factor", int)
    _check_type(keep_precision, "keep_precision", bool)
    whole = mode is MatMulSerializationMode.Disabled or factor in (0, 1)
    if listener() is None or whole:
        return torch.matmul(lhs, rhs)
    # As for torch.matmul, vectors are matrices with one row or column.
    left = lhs.unsqueeze(0) if lhs.dim() == 1 else lhs
    right = rhs.unsqueeze(1) if rhs.dim() == 1 else rhs
    extents = {_ROWS: left.shape[-2], _REDUCED: left.shape[-1], _COLUMNS: right.shape[-1]}
    fits = factor > 0 and extents[mode.value] % factor == 0
    title = "The factor of serializedMatMul must divide the dimension that is cut"
    got = f"factor={factor}, {_DIMENSIONS[mode.value]}: {extents[mode.value]}"
    operand_checks.that(fits, title, got, "choose a factor that divides it, or pad the operand")
    result: torch.Tensor = _serialized_matmul(left, right, mode.value, factor, keep_precision)
    if lhs.dim() == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if rhs.dim() == 1 else result


def _check_type(value: Any, name: str, kind: type) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise AssertionFailure(
            f"serializedMatMul: {name} must be of type {kind.__name__}",
            got=f"{type(value).__name__} {value!r}",
            fix=(
                "for example poptorch.serializedMatMul(x, y, "
                "poptorch.MatMulSerializationMode.ReducingDim, 4)"
            ),
        )


# The dimension that is cut in the two backward products, gradient @ right.mT and left.mT @
# gradient.
_FOR_LEFT = {_ROWS: _ROWS, _REDUCED: _COLUMNS, _COLUMNS: _REDUCED}
_FOR_RIGHT = {_ROWS: _REDUCED, _REDUCED: _ROWS, _COLUMNS: _COLUMNS}
# The dimensions along which the result, the left and the right operand are cut.
_CUTS = {_ROWS: (-2, -2, None), _REDUCED: (None, -1, -2), _COLUMNS: (-1, None, -1)}


def _product(
    lhs: torch.Tensor, rhs: torch.Tensor, cut: str, factor: int, exact: bool
) -> torch.Tensor:
    if rhs.dim() == 2 and lhs.dim() > 2:
        return _product(lhs.flatten(0, -2), rhs, cut, factor, exact).view(_shape(lhs, rhs))
    widened, summed = exact and lhs.dtype in HALF_TYPES, cut == _REDUCED
    dtype = torch.float32 if widened and summed else lhs.dtype
    out = (lhs.new_zeros if summed else lhs.new_empty)(_shape(lhs, rhs), dtype=dtype)
    store = torch.Tensor.add_ if summed else torch.Tensor.copy_
    pieces = (
        [operand] * factor if dim is None else operand.tensor_split(factor, dim)
        for operand, dim in zip((out, lhs, rhs), _CUTS[cut], strict=True)
    )
    for place, left, right in zip(*pieces, strict=True):
        store(place, left.float() @ right.float() if widened else left @ right)
    return out.to(lhs.dtype)


def _shape(lhs: torch.Tensor, rhs: torch.Tensor) -> tuple[int, ...]:
    batch = torch.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])  # type: ignore[no-untyped-call]
    return (*batch, lhs.shape[-2], rhs.shape[-1])


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
    batch = _shape(lhs, rhs)[:-2]
    target_shape = (*[1] * (len(batch) - len(shape) + 2), *shape[:-2])
    summed = [at for at, size in enumerate(batch) if target_shape[at] < size]
    kept = [at for at in range(len(batch)) if at not in summed]
    row, column = len(batch), len(batch) + 1
    if summed:
        lhs, rhs = (_with_rank(operand, column + 1) for operand in (lhs, rhs))
        lhs = lhs.permute(*kept, row, *summed, column).flatten(len(kept) + 1)
        rhs = rhs.permute(*kept, *summed, row, column).flatten(len(kept), -2)
    result: torch.Tensor = _serialized_matmul(lhs, rhs, cut, factor, exact)
    return result.reshape(shape)


def _with_rank(operand: torch.Tensor, rank: int, at: int = 0) -> torch.Tensor:
    shape = operand.shape
    return operand.reshape(*shape[:at], *[1] * (rank - len(shape)), *shape[at:])


def _lanes(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[torch.Tensor, int]:
    """Lanes are an additional batch dimension."""
    operands, settings, dims = args[:2], args[2:], in_dims[:2]
    rank = max(t.dim() - (dim is not None) for t, dim in zip(operands, dims, strict=True))
    lhs, rhs = (
        operand if dim is None else _with_rank(operand.movedim(dim, 0), rank + 1, 1)
        for operand, dim in zip(operands, dims, strict=True)
    )
    return _serialized_matmul(lhs, rhs, *settings), 0


_serialized_matmul = define(
    "serialized_matmul",
    "(Tensor lhs, Tensor rhs, str cut, int factor, bool exact) -> Tensor",
    _product,
    lambda lhs, rhs, *_: lhs.new_empty(_shape(lhs, rhs)),
    backward=_backward,
    setup_context=_remember,
    vmap=_lanes,
)
