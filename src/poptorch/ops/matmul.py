"""The matrix product in pieces. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from typing import Any

import torch

from .._base.errors import AssertionFailure, Error
from .._ops.context import listener
from .._ops.matmul import COLUMNS, REDUCED, ROWS, serialized_matmul
from ..enums import MatMulSerializationMode

_DIMENSIONS = {ROWS: "rows of lhs", REDUCED: "columns of lhs", COLUMNS: "columns of rhs"}


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """``torch.matmul`` in so many pieces, one after another, for less temporary memory.

    In a wrapped model the product and those of its gradients are computed piece by piece; outside
    one this is ``torch.matmul``. Source: PopTorch user guide, "PopTorch ops".

    Args:
        lhs: m x n, or a batch of such matrices, as for ``torch.matmul``.
        rhs: n x p.
        mode: which dimension is cut: ``InputChannels`` m, ``ReducingDim`` n, ``OutputChannels`` p.
        factor: how many pieces; 0 and 1 for the whole at once.
        keep_precision: half precision operands are multiplied, and pieces added, in float32.

    Raises:
        AssertionError: an argument of the wrong type.
        poptorch.Error: in a wrapped model, the factor does not divide the dimension.
    """
    _check_type(mode, "mode", MatMulSerializationMode)
    _check_type(factor, "factor", int)
    _check_type(keep_precision, "keep_precision", bool)
    whole = mode is MatMulSerializationMode.Disabled or factor in (0, 1)
    if listener() is None or whole:
        return torch.matmul(lhs, rhs)
    # As torch.matmul does: vectors are matrices of one row or column.
    left = lhs.unsqueeze(0) if lhs.dim() == 1 else lhs
    right = rhs.unsqueeze(1) if rhs.dim() == 1 else rhs
    extents = {ROWS: left.shape[-2], REDUCED: left.shape[-1], COLUMNS: right.shape[-1]}
    if factor < 0 or extents[mode.value] % factor:
        raise Error(
            "The factor of serializedMatMul must divide the dimension that is cut",
            got=f"factor={factor}, {_DIMENSIONS[mode.value]}: {extents[mode.value]}",
            fix="choose a factor that divides it, or pad the operand",
        )
    result: torch.Tensor = serialized_matmul(left, right, mode.value, factor, keep_precision)
    if lhs.dim() == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if rhs.dim() == 1 else result


def _check_type(value: Any, name: str, kind: type) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise AssertionFailure(
            f"serializedMatMul: {name} must be of type {kind.__name__}",
            got=f"{type(value).__name__} {value!r}",
            fix="poptorch.serializedMatMul(x, y, poptorch.MatMulSerializationMode.ReducingDim, 4)",
        )
