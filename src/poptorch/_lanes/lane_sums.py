"""Compute sums over lanes inside linear operators, as one product over all rows."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._ir.operators import SAME_NUMBERS
from .batched import FOLDED, BatchedCall, LaneRule, RowsRule, nodes_in, sum_dtype

aten = torch.ops.aten

# These are linear in their first argument if the others are shared.
_LINEAR = {
    *SAME_NUMBERS, aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.slice_backward.default, aten.select_backward.default,
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.mean.dim,
    aten.index_select.default,
}  # fmt: skip
Varies = Callable[[fx.Node], bool]


def folded(node: fx.Node, varies: Varies) -> RowsRule | None:
    entry = FOLDED.get(node.target)
    if entry is None or any(varies(n) for at in entry.shared for n in nodes_in(node.args[at])):
        return None
    normalizes = node.target is aten.native_batch_norm_backward.default and node.args[7]
    undivided = _sums_in_half(node, entry) and not isinstance(node.args[-1], list | tuple)
    return None if normalizes or undivided else entry


def _sums_in_half(node: fx.Node, entry: RowsRule) -> bool:
    results = [node.meta["val"][at] for at in entry.whole]
    return any(each is not None and sum_dtype(each.dtype) is not each.dtype for each in results)


def divided(call: BatchedCall, entry: RowsRule) -> tuple[BatchedCall, BatchedCall] | None:
    """Return a call for results with lanes and one for sums, in float32; None if one call computes
    both.
    """
    if not _sums_in_half(call.node, entry):
        return None
    *rest, output_mask = call.args
    rows, sums = copy.copy(call), call.widened()
    rows.args = (*rest, [own and at not in entry.whole for at, own in enumerate(output_mask)])
    sums.args = (*sums.args[:-1], [own and at in entry.whole for at, own in enumerate(output_mask)])
    return rows, sums


def sum_of(node: fx.Node, varies: Varies) -> bool:
    """Return whether one of several results already is a sum."""
    if node.target is not operator.getitem:
        return False
    source, at = node.args
    entry = folded(source, varies)  # type: ignore[arg-type]
    return entry is not None and at in entry.whole


def contraction(node: fx.Node, varies: Varies) -> LaneRule | None:
    """Return how to treat lanes as more rows, or as part of a sum that is computed anyway, if this
    is possible.
    """
    fits = _FIT.get(node.target)
    return _CONTRACTIONS.get(node.target) if fits is None or fits(node, varies) else None


def linear_in(node: fx.Node, varies: Varies) -> list[fx.Node]:
    """Return the varying inputs if the node is linear in them, and none otherwise."""
    inputs = [each for each in nodes_in(node.args) if varies(each)]
    if any(varies(each) for each in nodes_in(node.kwargs)):
        return []
    if in_all(node):
        return inputs
    places = [at for at, arg in enumerate(node.args) if any(map(varies, nodes_in(arg)))]
    of_one = len(places) == 1 and node.target is aten.mul.Tensor
    return inputs if of_one or (places == [0] and node.target in _LINEAR) else []


def in_all(node: fx.Node) -> bool:
    """Return whether a node is linear in all operands together. Adding a number is not linear."""
    sums = node.target in (aten.add.Tensor, aten.sub.Tensor)
    return node.target is aten.cat.default or (sums and isinstance(node.args[1], fx.Node))


def _of_one(call: BatchedCall) -> Any:
    """Compute a product with one shared operand from the sum of the other operand."""
    at = call.varying.index(True)
    total = call.args[at].sum(0, dtype=call.args[at].dtype)
    return call.node.target(*call.args[:at], total, *call.args[at + 1 :])  # type: ignore[operator]


def _mm(call: BatchedCall) -> Any:
    if not all(call.varying):
        return _of_one(call)
    left, right = call.args
    rows = left.transpose(1, 2).reshape(-1, left.shape[1])
    return torch.mm(rows.t(), right.reshape(-1, right.shape[2]))


def _bmm(call: BatchedCall) -> Any:
    if not all(call.varying):
        return _of_one(call)
    left = call.args[0]
    rows = left.permute(1, 0, 3, 2).reshape(left.shape[1], -1, left.shape[2])
    return torch.bmm(rows.transpose(1, 2), call.rows(1, 1))


def _sum(call: BatchedCall) -> Any:
    value, dims, keep = call.args[0], call.get(1), call.get(2, False)
    rank = value.dim() - 1
    all_dims = [0, *(dim % rank + 1 for dim in (dims or range(rank)))] if rank else [0]
    result = value.sum(all_dims, keepdim=keep, dtype=call.kwargs.get("dtype"))
    return result.squeeze(0) if keep else result


def _added_rows(call: BatchedCall) -> Any:
    """Rewrite ``index_add(zeros, 0, places, rows)``."""
    return call.args[0].index_add(0, call.rows(2), call.rows(3))


def _adds_rows_to_zeros(node: fx.Node, varies: Varies) -> bool:
    base, dim, places, *_ = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(places, fx.Node)
    zeros = base.target in _ZEROS and not varies(base)
    return zeros and dim == 0 and bool(places.meta["val"].dim() == 1) and not node.kwargs  # type: ignore[return-value]


_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
_CONTRACTIONS: dict[Any, LaneRule] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: lambda call: call.args[0].sum(dtype=call.kwargs.get("dtype")),
    aten.embedding_dense_backward.default: lambda call: call.run(call.lanes(0), call.lanes(1)),
    aten.index_add.default: _added_rows,
}
_FIT: dict[Any, Callable[[fx.Node, Varies], bool]] = {
    # Only without scaling by the number of look-ups of a row.
    aten.embedding_dense_backward.default: lambda node, _: not node.args[4],
    aten.index_add.default: _adds_rows_to_zeros,
}
