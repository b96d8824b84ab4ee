"""Compute operators for which torch's compiler has wrong code, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .kernels import Kernel, Kernels, when

aten = torch.ops.aten


def _has_a_factor(first: torch.Tensor, second: torch.Tensor, *, alpha: complex = 1) -> bool:
    return alpha != 1


@when(_has_a_factor)
def add(first: torch.Tensor, second: torch.Tensor, *, alpha: complex = 1) -> torch.Tensor:
    """Compute without ``addmm``, because torch 2.13 makes it from ``add(x, mm(a, b), alpha=f)`` and
    forgets the factor.
    """
    return first + second * alpha


def _is_expanded(tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return not all(stride or size == 1 for size, stride in dimensions)


@when(_is_expanded)
def put(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    """Copy expanded tensors first. Torch 2.13 writes to them in place, although all rows
    share memory.
    """
    return aten.index_put.default(tensor.contiguous(), indices, values, accumulate)


def select(tensor: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Select a slice for a loop. Torch's compiler has no code for the original operator, which
    would be a slow call with a line in the log.
    """
    return tensor.select(dim, index).clone()


CORRECTIONS: Kernels = {
    aten.add.Tensor: add,
    aten.index_put.default: put,
    aten.select_copy.int: Kernel(select),
    # Kernels that compiled code calls may not know that a tensor is a lazy conjugate of its memory.
    aten._conj.default: Kernel(aten.conj_physical.default),
    aten._neg_view.default: Kernel(aten.neg.default),
}
