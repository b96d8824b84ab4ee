"""Compute an operator over lanes, with its rule or with what ``vmap`` makes of this one operator.

If a value differs between lanes, the lanes are its first dimension. Other values are shared.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._base import private, source
from .._base.nested_values import with_tensors
from .._ir import block_labels
from .._ir.operators import RESHAPES, Operator, is_pointwise
from .._ir.symbolic import has_symbols, same_sizes
from .._ops import exchanges
from .._ops.recurrent_layers import (
    lstm_layer,
    lstm_layer_backward,
    stepwise_layer,
    stepwise_layer_backward,
)
from .promotion import computed
from .recorder import ORDERS, WritesInPlace

aten = torch.ops.aten
_batch_norm = aten._native_batch_norm_legit_functional.default


class NotVectorisable(Exception):  # noqa: N818 (not a failure: micro-batches run one by one)
    """Says which node prevents micro-batches from running side by side, and why."""

    named = False  # whether the text names the node


def named(node: fx.Node, why: str) -> NotVectorisable:
    line = block_labels.line_of(node)
    where = f" ({source.describe(*line)})" if line else ""
    error = NotVectorisable(f"{node.target}: {why}{where}")
    error.named = True
    return error


class BatchedCall:
    """A node, with the values of its arguments over lanes."""

    def __init__(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        varies: Callable[[fx.Node], bool],
        count: int,
    ) -> None:
        own = {each for each in values if varies(each)}
        spread = _spread(node, {n: values[n] for n in values if n not in own}, count)
        self.node, self.count, self.values = node, count, {**values, **spread}
        own |= spread.keys()
        self.inputs = [each for each in values if each in own]
        self.args: tuple[Any, ...] = fx.map_arg(node.args, self.values.get)
        self.kwargs: dict[str, Any] = fx.map_arg(node.kwargs, self.values.get)
        self.varying = tuple(not own.isdisjoint(nodes_in(arg)) for arg in node.args)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result in one lane."""
        return tuple(self.node.meta["val"].shape)

    def get(self, at: int, default: Any = None) -> Any:
        return self.args[at] if at < len(self.args) else default

    def shared(self, *at: int) -> bool:
        return not any(self.varying[each] for each in at if each < len(self.args))

    def lanes(self, at: int) -> torch.Tensor:
        value: torch.Tensor = self.args[at]
        return value if self.varying[at] else value.expand(self.count, *value.shape)

    def rows(self, at: int, dim: int | None = 0) -> Any:
        """Return an argument with its lanes joined along one of its dimensions, or in front."""
        if self.get(at) is None:
            return None
        value = self.lanes(at)
        if dim is None:
            return value
        value = value.movedim(0, dim)
        return value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])

    def unflatten(self, value: Any, dim: int | None = 0) -> Any:
        """Undo ``rows``. A result that is not computed is None."""
        if value is None or dim is None:
            return value
        shape = value.shape
        return value.reshape(*shape[:dim], self.count, -1, *shape[dim + 1 :]).movedim(dim, 0)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the node's operator. Arguments that are not given are those of the node."""
        rest = self.args[len(args) :]
        return self.node.target(*args, *rest, **{**self.kwargs, **kwargs})  # type: ignore[operator]

    def widened(self) -> BatchedCall:
        """Return the same call with float32 in place of half types, because sums over lanes need
        the range.
        """
        wide = copy.copy(self)
        both = self.args, self.kwargs
        wide.args, wide.kwargs = with_tensors(lambda value: value.to(sum_dtype(value.dtype)), both)
        if wide.kwargs.get("dtype") is not None:
            wide.kwargs = {**wide.kwargs, "dtype": sum_dtype(wide.kwargs["dtype"])}
        return wide


def _spread(
    node: fx.Node, shared: Mapping[fx.Node, Any], count: int
) -> dict[fx.Node, torch.Tensor]:
    """Return values that are equal for all lanes, expanded to each lane if a gradient's kernel
    needs this.

    In eager torch, gradients have the shape of their value. Kernels rely on this, or crash.
    """
    value = node.meta.get("val")  # nodes of a check have none
    of_gradient = str(node.target).partition(".")[2].partition(".")[0].endswith("_backward")
    if not of_gradient or not isinstance(value, torch.Tensor):
        return {}
    tensors = {each: v for each, v in shared.items() if isinstance(v, torch.Tensor)}
    alike = {each: v for each, v in tensors.items() if same_sizes(v.shape, value.shape)}
    return {each: v.expand(count, *v.shape) for each, v in alike.items()}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over lanes, because sums of half gradients may overflow."""
    return torch.float32 if dtype is torch.float16 else dtype


LaneRule = Callable[[BatchedCall], Any]


def nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return found


def batched(call: BatchedCall) -> Any:
    """Return the results of a node with varying arguments, each with lanes in front."""
    target = call.node.target
    if target is operator.getitem:
        return call.args[0][call.args[1]]
    if not isinstance(target, Operator):
        raise NotVectorisable("loops and branches run one micro-batch at a time")
    rule = RULES.get(target)
    result = NotImplemented if rule is None else rule(call)
    if result is NotImplemented and is_pointwise(call.node):
        result = _pointwise(call)
    result = vectorised(call) if result is NotImplemented else result
    _check_kinds(call.node.meta.get("val"), result, _WITHOUT_LANES.get(target, ()))
    return result


# Results that all lanes have in common, by index: a workspace, and statistics without elements.
_WITHOUT_LANES: dict[Any, tuple[int, ...]] = {
    lstm_layer: (3,),
    aten._native_batch_norm_legit_no_training.default: (1, 2),
}


def _check_kinds(one: Any, several: Any, common: Sequence[int]) -> None:
    """Raise ``NotVectorisable`` if results in lanes would have other types or shapes, except those
    that lanes have in common.
    """
    pairs = zip(one, several, strict=True) if isinstance(one, list | tuple) else [(one, several)]
    for at, (value, lanes) in enumerate(pairs):
        if not isinstance(lanes, torch.Tensor) or at in common:
            continue
        if lanes.dtype is not value.dtype:
            raise NotVectorisable(
                f"side by side, its result is {lanes.dtype} instead of {value.dtype}"
            )
        if _differ(lanes.shape[1:], value.shape):
            own, expected = tuple(lanes.shape[1:]), tuple(value.shape)
            raise NotVectorisable(f"side by side, its result is {own} instead of {expected}")


def _differ(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Return whether two shapes differ in their known sizes."""
    known = (pair for pair in zip(one, two, strict=False) if not has_symbols(pair))
    return len(one) != len(two) or any(own != other for own, other in known)


def vectorised(call: BatchedCall) -> Any:
    several: list[Any] = []
    shared = [
        node
        for node in call.node.all_input_nodes
        if node not in call.inputs and isinstance(call.values.get(node), torch.Tensor)
    ]
    nodes = [*call.inputs, *shared]
    dims = (0,) * len(call.inputs) + (None,) * len(shared)

    def one(*tensors: torch.Tensor) -> Any:
        given = {**call.values, **dict(zip(nodes, tensors, strict=True))}
        both = call.node.args, call.node.kwargs
        args, kwargs = (fx.map_arg(each, given.get) for each in both)
        result = call.node.target(*args, **kwargs)  # type: ignore[operator, arg-type]
        several[:] = result if isinstance(result, list | tuple) else [result]
        return [part for part in several if part is not None]

    try:
        results = iter(_over_lanes(one, dims, [call.values[node] for node in nodes]))
    except WritesInPlace as error:
        raise NotVectorisable(f"with lanes, it would write to a tensor: {error}") from error
    except RuntimeError as error:  # torch's error for an operator that it cannot vectorise
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotVectorisable(text) from error
    found = [None if part is None else next(results) for part in several]
    return found if isinstance(call.node.meta["val"], list | tuple) else found[0]


def _over_lanes(
    function: Callable[..., Any], dims: tuple[int | None, ...], values: list[torch.Tensor]
) -> Any:
    """Call a function for all lanes at once.

    Args:
        function: computes one lane.
        dims: the dimension of the lanes in each value; None for values that all lanes share.
        values: all tensors that the function reads. Those that it finds by itself would not be
            known to ``functionalize``, and writes to results of them would remain.
    """
    vectorising: Any = torch.func.vmap(function, in_dims=dims)
    enabled = private.optional("is_vmap_fallback_enabled")
    enable = private.optional("set_vmap_fallback_enabled")
    with contextlib.ExitStack() as stack:
        if enabled is not None and enable is not None:
            # Without a rule, torch would call an operator separately for each lane.
            stack.callback(enable, enabled())
            enable(False)
        try:
            return vectorising(*values)
        except WritesInPlace:
            return torch.func.functionalize(vectorising, remove="mutations")(*values)


def _pointwise(call: BatchedCall) -> Any:
    if not set(nodes_in(call.node.kwargs)).isdisjoint(call.inputs):
        return NotImplemented
    rank = len(call.shape)
    args = [
        with_rank(arg, rank, [call.count]) if own else arg
        for arg, own in zip(call.args, call.varying, strict=True)
    ]
    return computed(call.node, args, call.varying, call.kwargs)


def with_rank(value: torch.Tensor, rank: int, lead: Sequence[int]) -> torch.Tensor:
    """Insert dimensions of size 1 after the leading ones, until the value has this rank."""
    shape = value.shape[len(lead) :]
    missing = rank - len(shape)
    return value.reshape(*lead, *[1] * missing, *shape) if missing > 0 else value


def _shaped(call: BatchedCall) -> Any:
    return call.args[0].reshape(call.count, *call.shape)


def _expanded(call: BatchedCall) -> Any:
    return with_rank(call.args[0], len(call.shape), [call.count]).expand(call.count, *call.shape)


def _reordered(call: BatchedCall) -> Any:
    of_lane = call.node.args[0].meta["val"]  # type: ignore[union-attr]
    order = ORDERS[call.node.target](of_lane, *call.args[1:])
    return call.args[0].permute(0, *(dim + 1 for dim in order))


def _copied(call: BatchedCall) -> Any:
    layout = call.kwargs.get("memory_format")
    plain = layout in (None, torch.contiguous_format, torch.preserve_format)
    return call.run(memory_format=layout if plain else torch.preserve_format)


@dataclass(frozen=True)
class RowsRule:
    """The rule of operators that treat lanes as more rows of the batch."""

    places: tuple[int, ...]  # indices of the arguments that have rows
    shared: tuple[int, ...] = ()  # indices of arguments that must be the same for all lanes
    # indices of results that are computed from all rows, such as sums of gradients
    whole: tuple[int, ...] = ()
    dim: int | None = 0  # the dimension of the rows; None if they are all dimensions in front
    counted: int | None = None  # index of the argument that contains the number of rows

    def __call__(self, call: BatchedCall, **named: Any) -> Any:
        if not call.shared(*self.shared):
            return NotImplemented
        args = list(call.args)
        for at in self.places:
            args[at] = call.rows(at, self.dim)
        if self.counted is not None:
            args[self.counted] *= call.count
        found = call.run(*args, **named)
        if isinstance(found, torch.Tensor):
            return call.unflatten(found, self.dim)
        return [
            each if at in self.whole else call.unflatten(each, self.dim)
            for at, each in enumerate(found)
        ]


def _mm(call: BatchedCall) -> Any:
    if call.shared(0):
        return NotImplemented
    return RowsRule((0,))(call) if call.shared(1) else torch.bmm(*call.args)


def _addmm(call: BatchedCall) -> Any:
    of_all_rows = call.args[0].dim() < 2 or call.args[0].shape[0] == 1
    return RowsRule((1,), (0, 2))(call) if of_all_rows else NotImplemented


def _in_channels(call: BatchedCall, found: Any) -> list[Any]:
    """Normalize the channels of all lanes, which are side by side, separately."""
    value, *of_channels = found
    return [call.unflatten(value, 1), *map(call.unflatten, of_channels)]


def _repeated(call: BatchedCall, at: int) -> Any:
    return None if call.get(at) is None else call.lanes(at).reshape(-1)


def _batch_norm_in_training(call: BatchedCall) -> Any:
    """Normalize with statistics of the batch. The last two results are these, and not the running
    ones.
    """
    if not call.args[5]:
        return NotImplemented
    x, eps = call.rows(0, 1), call.args[7]
    dtype = call.node.args[3].meta["val"].dtype  # type: ignore[union-attr]
    none = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
    weights = _repeated(call, 1), _repeated(call, 2)
    return _in_channels(call, _batch_norm(x, *weights, none, none, True, 1.0, eps))


def _batch_norm_without_statistics(call: BatchedCall) -> Any:
    return _in_channels(call, call.run(call.rows(0, 1), _repeated(call, 1), _repeated(call, 2)))


def _batch_norm_with_running(call: BatchedCall) -> Any:
    if call.shared(1, 2, 3, 4):
        return RowsRule((0,), whole=_WITHOUT_LANES[call.node.target])(call)
    own = (_repeated(call, at) for at in range(1, 5))
    return _in_channels(call, call.run(call.rows(0, 1), *own))


def _batch_norm_backward(call: BatchedCall) -> Any:
    given = [call.rows(0, 1), call.rows(1, 1), *(_repeated(call, at) for at in range(2, 5))]
    own_statistics = (_repeated(call, at) if call.args[7] else call.args[at] for at in (5, 6))
    return _in_channels(call, call.run(*given, *own_statistics))


def _attention(operands: int) -> LaneRule:
    """Return the rule for the forward or backward operator, by the number of operands."""
    rows = RowsRule(tuple(range(operands)))

    def rule(call: BatchedCall) -> Any:
        if call.get(operands):
            raise NotVectorisable("its dropout cannot be computed separately for each micro-batch")
        mask = _mask_in_rows(call)
        return mask if mask is NotImplemented else rows(call, attn_mask=mask)

    return rule


def _mask_in_rows(call: BatchedCall) -> Any:
    mask = call.kwargs.get("attn_mask")
    if mask is None:
        return None
    own = call.node.kwargs["attn_mask"] in call.inputs
    size = call.args[1].shape[1] if call.varying[1] else call.args[1].shape[0]
    if not own:
        return mask if mask.dim() == 2 or mask.shape[0] == 1 else NotImplemented
    if mask.dim() == 3:
        mask = mask[:, None, None]
    mask = mask.expand(call.count, size, *mask.shape[2:])
    return mask.reshape(-1, *mask.shape[2:])


def _separate_weights(*weights: int) -> LaneRule:
    """Return the rule of a recurrent layer's gradient, by the indices of its weights."""

    def rule(call: BatchedCall) -> Any:
        if not call.shared(*weights):
            return NotImplemented
        raise NotVectorisable("it adds up the gradients of its weights over micro-batches")

    return rule


# For other operators, ``vmap`` does the same or something equally good.
RULES: dict[Any, LaneRule] = {
    **dict.fromkeys(RESHAPES, _shaped), **dict.fromkeys(ORDERS, _reordered),
    aten.expand.default: _expanded,
    aten.clone.default: _copied, aten._to_copy.default: _copied, aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.convolution.default: RowsRule((0,), (1, 2)),
    aten.native_layer_norm.default: RowsRule((0,), (2, 3), dim=None),
    aten.native_group_norm.default: RowsRule((0,), (1, 2), counted=3),
    aten.embedding.default: RowsRule((1,), (0,), dim=None),
    # the note of a failure has one number for each matrix
    aten._linalg_check_errors.default: lambda call: call.run(is_matrix=False),
    _batch_norm: _batch_norm_in_training,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_with_running,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(6),
    exchanges.exchange: lambda call: exchanges.over_lanes(call.lanes(0), *call.args[1:]),
    lstm_layer: RowsRule((0, 5, 6), (1, 2, 3, 4), _WITHOUT_LANES[lstm_layer], dim=1),
    lstm_layer_backward: _separate_weights(4, 5, 6, 7),
    stepwise_layer: RowsRule((0, 5), (1, 2, 3, 4), dim=1),
    stepwise_layer_backward: _separate_weights(3, 4),
}  # fmt: skip
# Gradients of weights are sums over rows, and therefore over lanes.
FOLDED: dict[Any, RowsRule] = {
    aten.convolution_backward.default: RowsRule((0, 1), (2,), (1, 2)),
    aten.native_layer_norm_backward.default: RowsRule((0, 1, 3, 4), (5, 6), (1, 2), dim=None),
    aten.native_group_norm_backward.default: RowsRule((0, 1, 2, 3), (4,), (1, 2), counted=5),
    aten.native_batch_norm_backward.default: RowsRule((0, 1), (2, 3, 4), (1, 2)),
    lstm_layer_backward: RowsRule((0, 1, 2, 3, *range(8, 13)), (4, 5, 6, 7), (1, 2, 3), dim=1),
    stepwise_layer_backward: RowsRule((0, 1, 2, 5, 6, 7), (3, 4), (1, 2, 3, 4), dim=1),
}
