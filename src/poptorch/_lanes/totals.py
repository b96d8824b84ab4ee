"""Sums over lanes, pushed back through linear operators to one product over all rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from .._ops.traceable import lstm_layer_backward
from .batched import (
    Call,
    Rule,
    batch_norm_backward_with_running,
    convolution_backward,
    group_norm_backward,
    layer_norm_backward,
    lstm_backward,
    nodes_in,
)

aten = torch.ops.aten

# By operator, the arguments in which it is linear while the others are shared.
_LINEAR: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default,
            aten.permute.default, aten.transpose.int, aten.expand.default, aten.clone.default,
            aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
            aten.slice.Tensor, aten.select.int, aten.slice_backward.default, aten.alias.default,
            aten.select_backward.default, aten.neg.default, aten.mul.Scalar, aten.div.Scalar,
            aten.div.Tensor, aten.mean.dim, aten._to_copy.default, aten.index_select.default,
        ),
        (0,),
    ),
    aten.mul.Tensor: (0, 1),
}  # fmt: skip
_IN_ALL = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default}


class Folded(NamedTuple):
    """Operators whose gradients of weights are sums over rows, and so over lanes."""

    rule: Rule
    sums: tuple[int, ...]  # these results
    weights: tuple[int, ...]  # these arguments are shared


FOLDED: dict[Any, Folded] = {
    aten.convolution_backward.default: Folded(convolution_backward, (1, 2), (2,)),
    aten.native_layer_norm_backward.default: Folded(layer_norm_backward, (1, 2), (5, 6)),
    aten.native_group_norm_backward.default: Folded(group_norm_backward, (1, 2), (4,)),
    aten.native_batch_norm_backward.default: Folded(
        batch_norm_backward_with_running, (1, 2), (2, 3, 4)
    ),
    lstm_layer_backward: Folded(lstm_backward, (1, 2, 3), (4, 5, 6, 7)),
}

Varies = Callable[[fx.Node], bool]


def folded(node: fx.Node, varies: Varies) -> Folded | None:
    entry = FOLDED.get(node.target)
    if entry is None or any(varies(n) for at in entry.weights for n in nodes_in(node.args[at])):
        return None
    normalizes = node.target is aten.native_batch_norm_backward.default and node.args[7]
    return None if normalizes else entry


def sum_of(node: fx.Node, varies: Varies) -> Folded | None:
    """What a result is part of that is a sum already."""
    if node.target is not operator.getitem:
        return None
    source, at = node.args
    entry = folded(source, varies)  # type: ignore[arg-type]
    return entry if entry is not None and at in entry.sums else None


def contracts(node: fx.Node, varies: Varies) -> bool:
    """Whether lanes can be more rows, or more of what is summed over anyway."""
    rule = _CONTRACTIONS.get(node.target)
    if rule is None:
        return False
    fits, _ = rule
    return fits(node, varies)


def linear_in(node: fx.Node, varies: Varies) -> list[fx.Node]:
    """The varying inputs, if the node is linear in them; none otherwise."""
    inputs = [each for arg in node.args for each in nodes_in(arg) if varies(each)]
    if any(varies(each) for each in nodes_in(node.kwargs)):
        return []
    if node.target in _IN_ALL:
        return inputs
    places = [at for at, arg in enumerate(node.args) if any(map(varies, nodes_in(arg)))]
    return inputs if len(places) == 1 and places[0] in _LINEAR.get(node.target, ()) else []


def total_of_linear(call: Call, totals: Mapping[fx.Node, Any]) -> Any:
    of_all, varying = call.node.target in _IN_ALL, set(call.inputs)

    def value(node: fx.Node) -> Any:
        if node in varying:
            return totals[node]
        return call.value(node) * call.count if of_all else call.value(node)

    args: Any = fx.map_arg(call.node.args, value)
    return call.node.target(*args, **call.kwargs)  # type: ignore[operator]


def total_of_contraction(call: Call) -> Any:
    _, make = _CONTRACTIONS[call.node.target]
    return make(call)


def _any(node: fx.Node, varies: Varies) -> bool:
    return True


def _of_one(call: Call) -> Any:
    """A product in which one operand is shared is that of the other's sum."""
    at = call.varying.index(True)
    total = call.args[at].sum(0, dtype=call.args[at].dtype)
    return call.node.target(*call.args[:at], total, *call.args[at + 1 :])  # type: ignore[operator]


def _mm(call: Call) -> Any:
    if not all(call.varying):
        return _of_one(call)
    left, right = call.args
    rows = left.transpose(1, 2).reshape(-1, left.shape[1])
    return torch.mm(rows.t(), right.reshape(-1, right.shape[2]))


def _bmm(call: Call) -> Any:
    if not all(call.varying):
        return _of_one(call)
    left = call.args[0]
    rows = left.permute(1, 0, 3, 2).reshape(left.shape[1], -1, left.shape[2])
    return torch.bmm(rows.transpose(1, 2), call.rows(1, 1))


def _sum(call: Call) -> Any:
    value, dims, keep = call.args[0], call.get(1), call.get(2, False)
    rank = value.dim() - 1
    all_dims = [0, *(dim % rank + 1 for dim in (dims or range(rank)))] if rank else [0]
    result = value.sum(all_dims, keepdim=keep, dtype=call.kwargs.get("dtype"))
    return result.squeeze(0) if keep else result


def _whole_sum(call: Call) -> Any:
    return call.args[0].sum(dtype=call.kwargs.get("dtype"))


def _added_rows(call: Call) -> Any:
    """``index_add(zeros, 0, places, rows)``."""
    return call.args[0].index_add(0, call.rows(2), call.rows(3))


def _adds_rows_to_zeros(node: fx.Node, varies: Varies) -> bool:
    base, dim, places, *_ = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(places, fx.Node)
    zeros = base.target in _ZEROS and not varies(base)
    return zeros and dim == 0 and bool(places.meta["val"].dim() == 1) and not node.kwargs  # type: ignore[return-value]


def _looked_up(call: Call) -> Any:
    return call.run(call.lanes(0), call.lanes(1))


def _counts_alike(node: fx.Node, varies: Varies) -> bool:
    return not node.args[4]


_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
_CONTRACTIONS: dict[Any, tuple[Callable[[fx.Node, Varies], bool], Rule]] = {
    aten.mm.default: (_any, _mm),
    aten.bmm.default: (_any, _bmm),
    aten.sum.dim_IntList: (_any, _sum),
    aten.sum.default: (_any, _whole_sum),
    aten.embedding_dense_backward.default: (_counts_alike, _looked_up),
    aten.index_add.default: (_adds_rows_to_zeros, _added_rows),
}
