"""Tensors that no program can read, and what is said of them. Asked once the quick look failed."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from .._base.errors import Error

_DENSE = "pass a dense tensor with values: tensor.to_dense(), tensor.dequantize(), torch.stack(...)"
_OWN = "pass a tensor with memory of its own: tensor.clone() before its storage was resized"
_PLAIN = "pass a plain tensor of this process: torch.tensor(...), tensor.as_subclass(torch.Tensor)"


def refuse_odd(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without plain values in memory.

    Raises:
        Error: sparse, nested, quantized, of another library, without data or with too little.
    """
    if torch.nn.parameter.is_lazy(tensor):
        refuse_kind(path, "a parameter that is not initialized", _PLAIN)
    if tensor.is_nested:
        refuse_kind(path, "a nested tensor", _DENSE)
    if tensor.layout is not torch.strided:
        refuse_kind(path, f"a tensor of layout {tensor.layout}", _DENSE)
    if tensor.is_quantized:
        refuse_kind(path, f"a quantized tensor, {tensor.dtype}", _DENSE)
    if tensor.is_meta:
        refuse_kind(path, "on the device meta, a tensor without values", _DENSE)
    if tensor.numel() and not _address(tensor):
        kind = type(tensor).__qualname__
        what = "a tensor" if type(tensor) is torch.Tensor else f"a {kind}"
        refuse_kind(path, f"{what} that has no values in memory", _PLAIN)
    if _needed(tensor) > int(tensor.untyped_storage().nbytes()):
        refuse_kind(path, "a tensor whose storage is smaller than it is", _OWN)


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # fake, functional, ... tensors, each with another text
        return 0


def _needed(tensor: torch.Tensor) -> int:
    """Bytes of storage that a tensor reaches."""
    if 0 in tensor.shape:
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in strides)
    return (last + 1) * tensor.element_size()


def refuse_kind(path: str, what: str, fix: str) -> NoReturn:
    """Raise the error about an input of a kind that is not supported.

    Raises:
        Error: always.
    """
    raise Error(
        "Unsupported tensor input type",
        got=f'input "{path}" is {what}',
        fix=fix,
    )


def row_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch makes it."""
    return tuple(math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))
