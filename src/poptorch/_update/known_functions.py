"""List how torch functions in a step treat numbers: which of them read, fill, scale or copy.

A function that is in none of these tables gets tensors in place of numbers. If that fails, the
numbers become constants of the program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ITEMS = {Tensor.item, Tensor.tolist}
TRUTHS = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
READS = {
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
    Tensor.__index__: "an index",
    Tensor.__complex__: "complex()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy.asarray()",
    torch.equal: "torch.equal",
    Tensor.equal: "equal()",
    torch.allclose: "torch.allclose",
    Tensor.allclose: "allclose()",
}
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
GET_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

MADE_OF_NOTHING = {
    torch.zeros: 0.0,
    torch.zeros_like: 0.0,
    torch.ones: 1.0,
    torch.ones_like: 1.0,
    Tensor.new_zeros: 0.0,
    Tensor.new_ones: 1.0,
    Tensor.zero_: 0.0,
}
"""Functions whose results have the same value in all elements."""
FILLING = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2, Tensor.fill_: 1}
"""Functions that fill a tensor, and the index of the value among their arguments."""
FROM_VALUES = {torch.tensor, torch.as_tensor}
UNSET = {torch.empty, torch.empty_like, Tensor.new_empty}
COPIES = {"clone", "contiguous", "to", "float", "double"}
ABOUT = {
    "__get__",
    "__set__",
    "untyped_storage",
    "stride",
    "storage_offset",
    "dim",
    "size",
    "numel",
    "__hash__",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "__format__",
    "__repr__",
}
"""Functions that describe a tensor without reading its values."""

LAYOUTS = {
    "stride",
    "dim_order",
    "is_contiguous",
    "as_strided",
    "as_strided_",
    "as_strided_copy",
    "as_strided_scatter",
}
"""Functions whose results depend on the memory layout of a tensor."""
PLACES = {
    "storage_offset",
    "as_strided",
    "as_strided_",
    "as_strided_copy",
    "as_strided_scatter",
}
"""Functions whose results depend on where in its storage a tensor is."""
ADDRESSES = {"data_ptr", "storage", "untyped_storage"}
"""Functions whose results show where in memory a tensor is."""

SCALED = {
    name: ("value" if name.startswith("addc") else "alpha", 1)
    for name in ("add", "sub", "addcmul", "addcdiv", "addmm", "addmv", "addbmm", "baddbmm", "addr")
}
"""Functions with a factor, its keyword, and the index of the operand that it scales."""
SCALED_OPERANDS = ("other", "tensor1", "mat1", "mat", "batch1", "vec1")
"""The keywords of these operands."""
PRODUCTS = {"addmm", "addmv", "addbmm", "baddbmm", "addr"}
ARITHMETIC = {"mul", "div", "true_divide", "truediv", "multiply", "divide", "pow", "rsub", "lerp"}
ARITHMETIC |= {"subtract", *SCALED}
ROUNDED_NUMBERS = {"add", "sub", "subtract", "rsub", "pow"}
"""Functions whose numbers torch rounds to a half type if the tensors have one."""

KEEPS_GEOMETRY = ARITHMETIC | {
    "abs", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "copy", "exp", "fill", "floor", "log",
    "neg", "reciprocal", "relu", "round", "rsqrt", "setitem", "sign", "sqrt", "square", "tanh",
    "zero",
}  # fmt: skip
"""Functions that, in place, change no shapes."""

WHOLE = {"add", "sub", "subtract", "rsub", "mul", "multiply", "neg", "abs", "floordiv", "mod"}
"""Functions whose result is an ``int`` if their operands are."""


_FIRST = ("condition", "input", "tensor", "tensors", "data", "size", "self")


def by_position(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call that names all of them, with the first one by position."""
    name = next((each for each in _FIRST if each in kwargs), None)
    return ((), kwargs) if name is None else ((kwargs.pop(name),), kwargs)


def title_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def operation_of(name: str) -> str:
    """Return the common name of a function, method and Python operator: ``mul`` for
    ``__imul__``.
    """
    if not name.startswith("__"):
        return name.rstrip("_")
    plain = name.strip("_")
    return plain[1:] if plain[:1] in ("i", "r") and plain[1:] in ARITHMETIC else plain


def is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
