"""Call the library that was measured to be faster for products, and compute products of one row as
loops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir.symbolic import same_sizes
from .._ops import library
from .kernels import when
from .packing import linear
from .product_libraries import LOOPS, ONEDNN, Matrix, Shape, by_rule, shape_of
from .windows import stored

aten = torch.ops.aten

_chosen = ContextVar[Mapping[Shape, str] | None]("libraries of the graph", default=None)
_SHORTEST = 32  # elements of a column; shorter sums are not vectorised


@contextlib.contextmanager
def choosing(chosen: Mapping[Shape, str]) -> Iterator[None]:
    """Use these libraries for products that are compiled within the block. A rule decides about
    others.
    """
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def choose_library(graph: fx.Graph) -> None:
    """Replace products by our operators. When they are lowered, they choose a library by the final
    layout.
    """
    if not private.has(private.PRODUCTS):
        return
    for usual, ours in _operators().items():
        for node in graph.find_nodes(op="call_function", target=usual):
            if not node.kwargs:
                node.target = ours


def chosen_products(graph: fx.Graph) -> list[fx.Node]:
    """Return the products that call the library that is chosen for them."""
    if not private.has(private.PRODUCTS):
        return []
    kinds = _operators().values()
    return [node for ours in kinds for node in graph.find_nodes(op="call_function", target=ours)]


@functools.cache
def _operators() -> dict[Any, Any]:
    made = {}
    for name, operands, usual in (
        ("product", "Tensor a, Tensor b", aten.mm.default),
        ("product_plus", "Tensor bias, Tensor a, Tensor b", aten.addmm.default),
    ):
        made[usual] = library.define(name, f"({operands}) -> Tensor", usual, usual)
        lower = functools.partial(_lowered, usual)
        private.register_lowering(made[usual], type_promotion_kind=None)(lower)
    return made


def _lowered(usual: Any, *operands: Any) -> Any:
    *bias, a, b = operands
    is_row = not bias or list(bias[0].get_size()) == list(b.get_size())[1:]
    chosen = _by_onednn(a, b, bias[0] if bias else None) if is_row else None
    if chosen is not None:
        return chosen
    if bias and is_row and a.get_dtype() == torch.float32:
        return private.lowerings[aten.add.Tensor](private.lowerings[aten.mm.default](a, b), *bias)
    return private.lowerings[usual](*operands)


def _by_onednn(a: Any, b: Any, bias: Any) -> Any:
    """Return a call of oneDNN without copies of operands; None if ATen is equally good."""
    if a.get_dtype() != torch.float32 or a.get_device().type != "cpu":
        return None
    kernel = private.ExternKernel
    a, b = (kernel.realize_input(operand) for operand in (a, b))
    if library_of(_matrix(a), _matrix(b)) != ONEDNN:
        return None
    inputs = [a, kernel.realize_input(private.PermuteView.create(b, [1, 0]))]
    return linear(inputs, bias)


def _matrix(operand: Any) -> Matrix:
    operand.freeze_layout()
    return tuple(map(_number, operand.get_size())), tuple(map(_number, operand.get_stride()))


def _number(size: Any) -> int:
    """Return a size of torch's compiler, of symbolic ones the example size."""
    known = isinstance(size, int) or size.is_number
    return int(size if known else private.V.graph.sizevars.optimization_hint(size))


def library_of(a: Matrix, b: Matrix) -> str | None:
    """Return the library for a product; None for ATen, whatever it calls."""
    shape = shape_of(a, b)
    if shape is None:
        return None
    return (_chosen.get() or {}).get(shape) or by_rule(shape)


def _is_row_for_loops(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether one row meets contiguous columns, and no library is faster."""
    fits = a.shape[0] == 1 and b.stride()[0] == 1 and b.shape[0] >= _SHORTEST
    if not fits or a.dtype != torch.float32 or a.device.type != "cpu":
        return False
    return library_of((a.shape, a.stride()), (b.shape, b.stride())) in (None, LOOPS)


@when(_is_row_for_loops)
def row_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of one row as loops, which the code generator fuses with what follows."""
    return (stored(a, *a.shape) * b.t()).sum(1).unsqueeze(0)


def _is_outer(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether each element is one product, which no library rounds differently."""
    return same_sizes(a.shape[1:], (1,)) and a.dtype in (torch.float32, torch.float64)


@when(lambda a, b: _is_outer(a, b) or _is_row_for_loops(a, b))
def small_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of a column and a row, or of one row, as loops."""
    return a * b if _is_outer(a, b) else row_product(a, b)


@when(lambda bias, a, b, **scales: not scales and _is_row_for_loops(a, b))
def row_product_and(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product plus an addend, as ``addmm`` does."""
    return row_product.compute(a, b) + bias  # type: ignore[no-any-return]
