"""Find the index values in a graph, their ranges, and the conditions under which the graph cannot
fail.

Inputs, also through views and casts, can be checked before anything runs. A value that is selected
from an input cannot fail if the whole input is in range, but it may also be valid otherwise. Such a
range is a precondition and not a check.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import fx

from .block_labels import line_of
from .graph import Graph
from .operators import Operator, draws
from .slots import Kind, Slot
from .symbolic import size_text, symbolic_dims

aten = torch.ops.aten

# These do not check parts of an input, because other parts may be larger, for example in edges
# between different sets.
_KEEPING = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.clone.default,
    aten._to_copy.default, aten.alias.default, aten.detach.default, aten.repeat.default,
    aten.flip.default, aten.contiguous.default,
}  # fmt: skip
# The results contain only numbers from these operands, or given numbers.
_PARTS: dict[Any, Callable[[Any], Sequence[Any]]] = {
    **dict.fromkeys(
        (aten.slice.Tensor, aten.select.int, aten.gather.default, aten.index_select.default,
         aten.as_strided.default),
        lambda args: args[:1],
    ),
    **dict.fromkeys(
        (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.full.default,
         aten.full_like.default),
        lambda args: args[1:2],
    ),
    **dict.fromkeys(
        (aten.slice_scatter.default, aten.select_scatter.default), lambda args: args[:2]
    ),
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda args: (0,)
    ),
    **dict.fromkeys((aten.cat.default, aten.stack.default), lambda args: args[0]),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), lambda args: args[::2]),
    aten.where.self: lambda args: args[1:3],
    aten.constant_pad_nd.default: lambda args: (args[0], args[2] if len(args) > 2 else 0),
}  # fmt: skip
# Operators that read indices along their second argument, labels after scores, and positions.
_ALONG = {
    aten.gather.default, aten.index_select.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default,
    aten.index_copy.default,
}  # fmt: skip
_UNPOOLING = {aten.max_unpool2d.default, aten.max_unpool3d.default}
# For these, compiled code accepts what eager kernels refuse. Others check their operands.
_TAKEN = {*_ALONG, *_UNPOOLING} - {aten.gather.default, aten.scatter.src}
# Indices of operands that must be probabilities, and operators that divide integers.
_PROBABILITIES = {aten.binary_cross_entropy.default: (0, 1), aten.bernoulli.default: (0,)}
_DIVISIONS = {
    aten.div.Tensor_mode, aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor,
}  # fmt: skip
_SCORES = {
    aten.nll_loss_forward.default: 0, aten.nll_loss2d_forward.default: 0,
    aten.nll_loss_backward.default: 1, aten.nll_loss2d_backward.default: 1,
}  # fmt: skip
_LIMITED = {aten.embedding.default, *_ALONG, *_UNPOOLING, *_SCORES}
_PLACES = {aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor}
_WITH_INDICES = _LIMITED | _PLACES | {aten.embedding_dense_backward.default}
_GIVEN = (Kind.BATCH, Kind.BUFFER, Kind.CONSTANT)
_CHECKABLE = (Kind.BATCH, Kind.BUFFER)
_FEW = 64  # up to this number of values, a search in Python is faster: 3 us instead of 9
_CHOOSING = {aten.argmax.default, aten.argmin.default}
_SORTING = {  # and the index of their dimension argument
    aten.topk.default: 2, aten.kthvalue.default: 2, aten.sort.default: 1, aten.max.dim: 1,
    aten.min.dim: 1, aten.mode.default: 1, aten.median.dim: 1, aten.cummax.default: 1,
    aten.cummin.default: 1,
}  # fmt: skip
# Operators whose kernels read values and raise errors. Operators of other libraries may do
# anything.
_RAISING = (
    "bernoulli", "multinomial", "cholesky", "linalg", "lu_", "_assert", "ctc_loss", "embedding_bag",
    "normal", "poisson", "binomial", "take", "put", "scatter", "gather", "index", "embedding",
    "nll_loss", "multi_margin", "multilabel", "one_hot", "histc", "bincount", "searchsorted",
    "repeat_interleave", "unique", "nonzero", "masked_select", "inverse", "triangular", "geqrf",
    "binary_cross_entropy", "max_unpool",
)  # fmt: skip
# All other operators with tensors of these names may also raise errors.
_INDICES = {"index", "indices", "offsets", "offs", "lengths", "repeats", "sorter"}
# they do not check, or their indices come from the forward pass or from constant numbers
_NOT_RAISING = {
    aten.bernoulli.p, aten.normal_functional.default, aten.normal.float_float,
    aten.linalg_vector_norm.default, aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default,
    aten.value_selecting_reduction_backward.default, aten.cummaxmin_backward.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default, aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.binary_cross_entropy_with_logits.default,
}  # fmt: skip
# Our operators that run the user's code, or read values.
_INDEX_READERS = {"host_call", "custom_op", "custom_op_backward", "ctc_losses", "ctc_beam_search"}


@dataclass(frozen=True)
class IndexRange:
    slot: Slot  # a batch, a buffer or a constant
    least: int
    most: int
    ignored: frozenset[int]  # additional values that are allowed
    operator: str  # the operator that reads it
    line: tuple[str, int] | None  # the user's line

    def outside(self, value: torch.Tensor) -> list[tuple[int, ...]]:
        shape = value.shape
        count = shape[0] if len(shape) == 1 else shape.numel()
        if not count or value.is_meta:  # a buffer of another process, which checks it
            return []
        if count > _FEW:
            least, most = (extreme.item() for extreme in torch.aminmax(value))
        else:
            numbers = (value if len(shape) == 1 else value.flatten()).tolist()
            least, most = min(numbers), max(numbers)
        if self.least <= least and most <= self.most:
            return []
        bad = (value < self.least) | (value > self.most)
        for each in self.ignored:
            bad &= value != each
        return [tuple(place) for place in bad.nonzero().tolist()]


@dataclass(frozen=True)
class _Use:
    """An index that an operator reads, or a value from which it comes: a node or a number."""

    index: Any
    least: int
    most: int
    ignored: frozenset[int] = frozenset()  # values that do not become indices
    whole: bool = True  # whether the operator reads all of its values, and no others


def ranges(graphs: Sequence[Graph]) -> tuple[IndexRange, ...]:
    """Return the ranges of graphs' inputs that can be checked; of several equal ones, the first."""
    result: dict[Any, IndexRange] = {}
    for graph in graphs:
        slots = graph.arguments
        find = graph.module.graph.find_nodes
        found = [find(op="call_function", target=target, sort=False) for target in _WITH_INDICES]
        for node in sorted(chain.from_iterable(found)):
            for use in _sources(_uses(node)):
                slot = slots.get(use.index) if use.whole else None
                if slot is not None and slot.kind in _CHECKABLE:
                    key = slot.key, use.least, use.most, use.ignored
                    result.setdefault(key, _range(slot, use, node))
    return tuple(result.values())


def preconditions(
    graphs: Mapping[str, Graph], checked: bool
) -> dict[str, tuple[IndexRange, ...] | None]:
    """Return for each graph the ranges of whole inputs that are needed so that no value makes it
    fail.

    With ``checked``, also those of inputs that ``ranges`` returns. None means that a graph may fail
    in any case.
    """
    written = {slot.key for graph in graphs.values() for slot in graph.outputs}
    return {name: _preconditions(graph, checked, written) for name, graph in graphs.items()}


def _preconditions(
    graph: Graph, checked: bool, written: Collection[str]
) -> tuple[IndexRange, ...] | None:
    slots = graph.arguments
    fixed: set[fx.Node] = set()
    needed: dict[IndexRange, None] = {}
    for node in graph.module.graph.nodes:
        if _is_fixed(node, slots, fixed):
            fixed.add(node)
            continue
        if not _may_raise(node):
            continue
        uses = _uses(node)
        if not uses:
            return None
        for use in _sources(uses):
            slot = slots.get(use.index)
            if use.whole and checked and slot is not None and slot.kind in _CHECKABLE:
                continue
            if use.index in fixed or _is_allowed(use):
                continue
            if slot is None or slot.kind not in _GIVEN or slot.key in written:
                return None
            needed[_range(slot, use, node)] = None
    has_parts = any(
        isinstance(part, fx.GraphModule) and part is not graph.module
        for part in graph.module.modules()
    )
    return None if has_parts else tuple(needed)


def _range(slot: Slot, use: _Use, node: fx.Node) -> IndexRange:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    return IndexRange(slot, use.least, use.most, use.ignored, name, line_of(node))


def _is_fixed(node: fx.Node, slots: dict[fx.Node, Slot], fixed: set[fx.Node]) -> bool:
    """Return whether a node has the same value in every call, so that it can only fail in the first
    one.
    """
    if node.op == "placeholder":
        return slots[node].kind is Kind.CONSTANT
    return node.op == "call_function" and fixed.issuperset(node.all_input_nodes) and not draws(node)


def _may_raise(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, Operator):
        return False
    return _kernel_may_raise(target) or (
        target.namespace != "poptorch" and target not in _NOT_RAISING and _divides_integers(node)
    )


@functools.cache
def _kernel_may_raise(target: Any) -> bool:
    name = target.overloadpacket.__name__.lstrip("_")
    if target.namespace == "poptorch":
        return name in _INDEX_READERS
    if target.namespace not in ("aten", "prims"):
        return True
    if target in _NOT_RAISING:
        return False
    tensors = {a.name for a in target._schema.arguments if "Tensor" in str(a.type)}
    return name.startswith(_RAISING) or not tensors.isdisjoint(_INDICES)


def _sources(uses: Sequence[_Use]) -> Iterator[_Use]:
    ahead, seen = [*reversed(uses)], set[_Use]()
    while ahead:
        use = ahead.pop()
        if use in seen:
            continue
        seen.add(use)
        parts = _parts(use.index) if isinstance(use.index, fx.Node) else ()
        if not parts:
            yield use
        ahead += [
            replace(use, index=part, ignored=use.ignored | ignored, whole=use.whole and whole)
            for part, ignored, whole in parts
        ]


def _parts(node: fx.Node) -> Sequence[tuple[Any, frozenset[int], bool]]:
    """Return the nodes from which a node has its values, with ``ignored`` and ``whole`` of each.

    The result is empty if the node computes new values.
    """
    target, args = node.target, node.args
    if target in _KEEPING and isinstance(args[0], fx.Node) and _is_integer(args[0]):
        return [(args[0], frozenset(), True)]
    # Labels in lanes are where(labels != ignored, labels, 0).
    if target is aten.where.self and (ignored := _compared(args[0], aten.ne.Scalar, args[1])):
        return [(args[1], ignored, True)]
    taken = _PARTS[target](args) if target in _PARTS else ()
    parts = [(part, frozenset[int](), False) for part in taken]
    # Labels before an index are masked_fill(labels, labels == ignored, 0).
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        parts[0] = args[0], _compared(args[1], aten.eq.Scalar, args[0]), False
    return parts


def _compared(mask: Any, how: object, value: Any) -> frozenset[int]:
    if isinstance(mask, fx.Node) and mask.target is how and mask.args[0] is value:
        return frozenset({mask.args[1]})  # type: ignore[arg-type]
    return frozenset()


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_allowed(use: _Use) -> bool:
    if not isinstance(use.index, fx.Node):
        return use.least <= use.index <= use.most or use.index in use.ignored
    least, most = _bounds(use.index)
    return use.least <= least and most <= use.most


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool
    )


def _bounds(node: fx.Node) -> tuple[float, float]:
    args: Any = node.args
    if node.target is aten.remainder.Scalar and isinstance(args[1], int) and args[1] > 0:
        return 0, args[1] - 1
    if node.target is aten.clamp.default:
        bounds = [*args[1:], None, None][:2]
        least = node.kwargs.get("min", bounds[0])
        most = node.kwargs.get("max", bounds[1])
        if least is not None and most is not None:
            return least, most
    chosen = _chosen(node)
    return (-math.inf, math.inf) if chosen is None else (0, _count(*chosen) - 1)


def _chosen(node: fx.Node) -> tuple[fx.Node, int | None] | None:
    """Return the tensor from which an operator chooses elements whose indices it returns, and the
    dimension, None for all of them.
    """
    args: Any = node.args
    if node.target in _CHOOSING:
        return args[0], next(iter(args[1:2]), None)
    if node.target is operator.getitem and args[1] == 1 and args[0].target in _SORTING:
        operands, at = args[0].args, _SORTING[args[0].target]
        return operands[0], next(iter(operands[at : at + 1]), -1)
    return None


def _count(node: fx.Node, dim: int | None) -> float:
    shape, are_open = _shape(node), symbolic_dims(node)
    if any(are_open) if dim is None or not shape else are_open[dim]:
        return math.inf
    return math.prod(shape) if dim is None or not shape else shape[dim]


def _shape(node: Any) -> torch.Size:
    return node.meta["val"].shape  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Refusal:
    """A condition of an operator: its operand ``place`` must be in a range."""

    place: int
    least: float
    most: float
    zero: bool = True  # whether zero is allowed


def refusals(graph: fx.Graph) -> Iterator[tuple[fx.Node, Refusal]]:
    """List conditions that eager kernels check, but neither compiled code nor calls do."""
    for node in graph.nodes:
        for place in _PROBABILITIES.get(node.target, ()):
            yield node, Refusal(place, 0.0, 1.0)
        if node.target is aten.repeat_interleave.Tensor:
            yield node, Refusal(0, 0.0, math.inf)
        if _divides_integers(node):
            yield node, Refusal(1, -math.inf, math.inf, zero=False)
        for use in _uses(node) if node.target in _TAKEN else ():
            if not all(map(_is_given, _sources([use]))):
                yield node, Refusal(node.args.index(use.index), use.least, use.most)


def _is_given(use: _Use) -> bool:
    whole = isinstance(use.index, fx.Node) and use.index.op == "placeholder" and use.whole
    return whole or _is_allowed(use)


def _divides_integers(node: fx.Node) -> bool:
    operands = node.args[:2] if node.target in _DIVISIONS else (None,)
    return all(isinstance(each, fx.Node) and _is_integer(each) for each in operands)


def along_symbols(graph: fx.Graph) -> fx.Node | None:
    """Return an operator whose indices compiled code cannot check, because a symbolic size limits
    them. Eager kernels check their own indices.
    """
    taken = (node for node in graph.nodes if node.target in _TAKEN and _is_open(node))
    return next((node for node in taken if not _was_chosen_there(node)), None)


def _was_chosen_there(node: fx.Node) -> bool:
    """Return whether the indices of an operator come from sorting along a dimension as large as the
    one that limits them.
    """
    if node.target not in _ALONG:
        return False
    tensor, dim, index = cast("Any", node.args[:3])
    while index.target in _KEEPING and index.target is not aten._to_copy.default:
        index = index.args[0]
    operand, along = _chosen(index) or (None, None)
    if operand is None or along is None or not _shape(operand):
        return False
    return size_text(operand, along) == size_text(tensor, dim)


def _is_open(node: fx.Node) -> bool:
    """Return whether a symbolic size limits the indices that an operator reads."""
    target, args = node.target, cast("Any", node.args)
    if target in _UNPOOLING:
        return any(isinstance(size, fx.Node) for size in args[2])
    if target in _SCORES:
        return symbolic_dims(args[_SCORES[target]])[:2][-1]
    along = args[1] if target in _ALONG else 0
    dims = symbolic_dims(args[0])
    return bool(dims) and dims[along]


def _uses(node: fx.Node) -> list[_Use]:
    target = node.target
    uses: list[_Use] = []
    if target not in _WITH_INDICES:
        return uses
    args = cast("Any", node.args)
    if target in _LIMITED and _is_open(node):
        return uses
    if target is aten.embedding.default:
        uses = [_Use(args[1], 0, _shape(args[0])[0] - 1)]
    elif target is aten.embedding_dense_backward.default:
        uses = [_Use(args[1], 0, args[2] - 1)]
    elif target in _ALONG:
        shape = _shape(args[0])
        uses = [_Use(args[2], 0, shape[args[1]] - 1 if shape else 0)]
    elif target in _UNPOOLING:
        uses = [_Use(args[1], 0, math.prod(args[2]) - 1)]
    elif target in _SCORES:
        scores, labels, *_, ignored = args[_SCORES[target] :][:5]
        classes = _shape(scores)[:2][-1]
        uses = [_Use(labels, 0, classes - 1, frozenset({ignored}))]
    elif target in _PLACES:
        sizes = zip(args[1], _shape(args[0]), symbolic_dims(args[0]), strict=False)
        uses = [_Use(index, -size, size - 1) for index, size, is_open in sizes if not is_open]
    return [use for use in uses if isinstance(use.index, fx.Node) and not _is_mask(use.index)]
