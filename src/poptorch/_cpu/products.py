"""Call the library that was measured to be faster for products, and compute attention as products
or loops.
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
from .._ir.symbolic import hint
from .._ops import library
from .libraries import LOOPS, ONEDNN, Matrix, Shape, by_rule, shape_of
from .packing import linear
from .windows import stored

aten = torch.ops.aten

_chosen = ContextVar[Mapping[Shape, str] | None]("libraries of the graph", default=None)
LONGEST = 256  # positions of attention; with more, little is gained, and the scores take memory
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
    """Return a size of torch's compiler, of symbolic ones the stand-in's."""
    known = isinstance(size, int) or size.is_number
    return int(size if known else private.V.graph.sizevars.optimization_hint(size))


def library_of(a: Matrix, b: Matrix) -> str | None:
    """Return the library for a product; None for ATen, whatever it calls."""
    shape = shape_of(a, b)
    if shape is None:
        return None
    return (_chosen.get() or {}).get(shape) or by_rule(shape)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the result for one query of each head, and the logarithms of the sums, with loops.

    ATen calls a library for each head. A step of a GPT-2 with 8 rows takes 0.8 of the time, if one
    thread computes and the machine is idle otherwise.
    """
    several = query.shape[2] != 1 or query.shape[1] != key.shape[1]
    if several or query.dtype != torch.float32 or dropout_p or is_causal:
        return NotImplemented
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * key).sum(-1, keepdim=True) * scale
    if attn_mask is not None:
        scores = scores + attn_mask.mT
    most = scores.amax(2, keepdim=True)
    # a query that may attend to nothing gets zeros
    most = torch.where(most == -torch.inf, 0.0, most)
    weights = torch.exp(scores - most)
    total = weights.sum(2, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    found = (weights / total * value).sum(2, keepdim=True)
    return found, (total.log() + most).squeeze(-1)


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the gradients of query, key and value, as ATen's operator does.

    In bfloat16 over short sequences, this makes five products over all heads at once, whereas ATen
    multiplies small blocks head by head. It rounds where ATen rounds. A step of a BERT with 4
    layers takes 76 ms instead of 90. In float32 there is no gain.
    """
    narrow, heads = query.dtype, query.shape[1] == key.shape[1]
    if narrow != torch.bfloat16 or dropout_p or not heads:
        return NotImplemented
    if max(hint(query.shape[2]), hint(key.shape[2])) > LONGEST:
        return NotImplemented
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _product(query.float(), key.float().mT) * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        shown = torch.ones(scores.shape[-2:], dtype=torch.bool, device=grad.device).tril()
        scores = torch.where(shown, scores, float("-inf"))
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    inner = (grad.float() * out.float()).sum(-1, keepdim=True)
    changes = weights * (_product(grad.float(), value.float().mT) - inner) * scale
    weights, changes = weights.to(narrow), changes.to(narrow)
    return _product(changes, key), _product(changes.mT, query), _product(weights.mT, grad)


def row_product(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the product of one row as loops, which the code generator fuses with what follows.

    Columns must be contiguous. A library computes a large product if it is faster.
    """
    fits = a.shape[0] == 1 and b.stride()[0] == 1 and b.shape[0] >= _SHORTEST
    if not fits or a.dtype != torch.float32 or a.device.type != "cpu":
        return NotImplemented
    if library_of((a.shape, a.stride()), (b.shape, b.stride())) not in (None, LOOPS):
        return NotImplemented
    return (stored(a, *a.shape) * b.t()).sum(1).unsqueeze(0)


def row_product_and(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: Any) -> Any:
    """Return the product plus an addend, as ``addmm`` does."""
    product = NotImplemented if scales else row_product(a, b)
    return NotImplemented if product is NotImplemented else product + bias


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    return product.reshape(*a.shape[:2], *product.shape[1:])
