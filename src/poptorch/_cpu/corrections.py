"""Compute operators for which torch's compiler has wrong code, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .kernels import Kernel, Kernels, when

aten = torch.ops.aten


def _is_whole(first: torch.Tensor | complex, second: object, **_: Any) -> bool:
    """Return whether a tensor of integers or flags meets a complex number. The first operand is a
    number where torch has written a difference from a number as ``sub``.
    """
    if not isinstance(first, torch.Tensor) or not isinstance(second, complex):
        return False
    return not (first.is_floating_point() or first.is_complex())


def _in_complex(operator: Any) -> Kernel:
    """Compute with complex numbers of the result's type. Torch 2.13 takes complex128 for integers
    and a complex number, where eager torch takes complex64.
    """

    @when(_is_whole)
    def compute(first: torch.Tensor, second: complex, **options: Any) -> Any:
        return operator(first.to(torch.result_type(first, second)), second, **options)

    return compute


def _has_a_factor(first: torch.Tensor, second: Any, *, alpha: complex = 1) -> bool:
    return alpha != 1 or _is_whole(first, second)


@when(_has_a_factor)
def add(first: torch.Tensor, second: Any, *, alpha: complex = 1) -> Any:
    """Compute without ``addmm``, because torch 2.13 makes it from ``add(x, mm(a, b), alpha=f)`` and
    forgets the factor.
    """
    if _is_whole(first, second):
        first = first.to(torch.result_type(first, second))
    return first + second * alpha


def _is_byte(tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
    return tensor.dtype == torch.uint8


def _any_byte(operator: Any) -> Kernel:
    """Return bytes, as eager torch does for bytes. Torch's compiler returns flags."""

    @when(_is_byte)
    def compute(tensor: torch.Tensor, *where: Any, **options: Any) -> Any:
        return operator(tensor != 0, *where, **options).to(torch.uint8)

    return compute


def _both_whole(number: complex, exponent: torch.Tensor) -> bool:
    result = torch.result_type(number, exponent)
    return not (result.is_floating_point or result.is_complex)


@when(_both_whole)
def power(number: int, exponent: torch.Tensor) -> torch.Tensor:
    """Return integers, as eager torch does. Torch's compiler computes a number to the power of
    integers in float32.
    """
    whole = torch.result_type(number, exponent)
    return torch.pow(torch.full_like(exponent, number, dtype=whole), exponent)


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
    **{each: _in_complex(each) for each in (aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
    aten.rsub.Scalar: _in_complex(aten.rsub.Scalar),
    **{each: _any_byte(each) for each in (aten.any.default, aten.any.dim, aten.any.dims)},
    aten.pow.Scalar: power,
    aten.index_put.default: put,
    aten.select_copy.int: Kernel(select),
    # Kernels that compiled code calls may not know that a tensor is a lazy conjugate of its memory.
    aten._conj.default: Kernel(aten.conj_physical.default),
    aten._neg_view.default: Kernel(aten.neg.default),
}
