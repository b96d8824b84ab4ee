"""Decide which parts of a graph are equal, such as the layers of a transformer, and cut the graph
there, so that equal parts are compiled once.

Every cut is correct, because pieces count as equal only if everything that they compute, read and
write is equal.
Each piece computes the symbolic sizes that it needs from its own inputs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._ir.conditions import expression
from .._ir.graph import copied, copy_node, graph_module, placeholder
from .._ir.operators import Operator, may_view, storage_root
from .._ir.repeats import Stretch, repetitions
from .._ir.symbolic import computes_size, hint, same_sizes, size_symbols
from ..backends.prepare import write_last
from .in_place_writes import hoist

aten = torch.ops.aten

# The minimum number of operators that a cut must save from being compiled. A BERT with two layers
# saves 78, and is lowered in 1.8 s of processor time instead of 3.1. Calls of pieces take 0.06 ms
# of a step. This is nothing if operators write this number of bytes, but 6 per cent for a GPT-2
# with two layers, 64 wide.
LEAST_SAVED, _OF_LARGE, _LARGE = 500, 50, 1 << 25
_OF_ONE = 30  # operators that one repetition must save
_LEAST_PERIOD, _LONGEST = 12, 4

_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
}  # fmt: skip
_Sizes = Mapping[Any, tuple[fx.Node, int]]  # for each size, an input with this dimension
_SELECTING = {aten.select.int, aten.slice.Tensor}
_VIEWS = {  # these never copy
    *_SELECTING, aten.transpose.int, aten.permute.default, aten.t.default, aten.view.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
}  # fmt: skip
# The parts of a tensor that bundles small weights (each layer reads a different part), and inputs
# from which sizes are read.
_PARTS = {aten.as_strided.default, aten.slice.Tensor, aten.select.int, aten.alias.default}


@dataclass(frozen=True)
class Argument:
    """A value, or a view of one: sizes, strides and offset in its memory. A negative offset counts
    from the beginning of the value, which is -1.

    Symbolic sizes are expressions.
    """

    slot: int
    view: tuple[tuple[Any, ...], tuple[Any, ...], Any] | None = None


@dataclass(frozen=True, eq=False)
class Piece:
    module: fx.GraphModule
    places: tuple[int, ...]  # inputs to which the last results are written
    values: tuple[Any, ...]  # examples of the inputs

    def signature(self) -> str:
        """Return everything that the piece computes. Pieces with equal signatures are equal."""
        names = {node: f"%{at}" for at, node in enumerate(self.module.graph.nodes)}
        nodes = (_text(node, names) for node in self.module.graph.nodes)
        return "\n".join((repr(self.places), *nodes))


@dataclass(frozen=True)
class PieceCall:
    piece: int
    inputs: tuple[Argument, ...]
    outputs: tuple[int, ...]  # slots


@dataclass(frozen=True)
class PieceChain:
    """Pieces and their calls in order. The first slots are the inputs of the whole graph."""

    pieces: tuple[Piece, ...]
    calls: tuple[PieceCall, ...]
    results: tuple[Argument, ...]
    inputs: int
    slots: int
    # for each symbol, an input of the whole graph and the dimension with this size
    sizes: Mapping[Any, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        times = Counter(call.piece for call in self.calls)
        sizes = (len(piece.module.graph.nodes) for piece in self.pieces)
        texts = (f"{size} nodes x {times[at]}" for at, size in enumerate(sizes))
        return f"Compiling each piece once: {', '.join(texts)}"


def _text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Describe what a node computes, from what, and the memory layout of its result."""
    function = node.target if node.op == "call_function" else node.op
    name: Any = names.get
    arguments = "" if _is_part(node) and not names else fx.map_arg((node.args, node.kwargs), name)
    return f"{function} {arguments} {_described(_value(node))}"


def _described(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    return value


def cut(
    module: fx.GraphModule, places: Sequence[int], examples: Sequence[torch.Tensor]
) -> PieceChain | None:
    """Cut a graph whose last results are written to inputs; None if this saves too little."""
    module = copied(module)
    for node, example in zip(module.graph.find_nodes(op="placeholder"), examples, strict=True):
        node.meta["val"] = example
    nodes = module.graph.nodes
    if any(n.op == "get_attr" or n.target is aten.convolution.default for n in nodes):
        # bodies of loops are not cut, and layouts of images are chosen for a graph as a whole
        return None
    write_last(module, places)
    hoist(module.graph)
    sizes = _read_from_inputs(module.graph)
    calls = (node for node in nodes if node.op == "call_function")
    order = [node for node in calls if not _is_part(node) and not computes_size(node)]
    repeats = _repeats(order)
    if not repeats:
        return None
    chain = _Cutter(module, order, repeats, sizes).chain()
    if chain is None:
        return None
    saved = len(order) - sum(len(piece.module.graph.nodes) for piece in chain.pieces)
    tensors = (value for value in map(_value, order) if isinstance(value, torch.Tensor))
    is_large = sum(map(_bytes, tensors)) >= _LARGE
    return chain if saved >= (_OF_LARGE if is_large else LEAST_SAVED) else None


def _read_from_inputs(graph: fx.Graph) -> _Sizes:
    """Read sizes from inputs of the graph, or compute them from such sizes, so that no value is
    handed on for its size alone.

    They are read from an alias, because the first layer has the same inputs as the others only if
    it gets this input for sizes in addition to the one with which it computes.
    """
    sizes: dict[Any, tuple[fx.Node, int]] = {}
    inputs = graph.find_nodes(op="placeholder")
    for node in inputs:
        new = {
            expression(size): dim
            for dim, size in enumerate(_value(node).shape)
            if isinstance(size, torch.SymInt) and expression(size) not in sizes
        }
        if new:
            with graph.inserting_before(inputs[-1].next):
                alias = graph.call_function(aten.alias.default, (node,))
            alias.meta["val"] = _value(node)
            sizes |= {each: (alias, dim) for each, dim in new.items()}
    known: set[fx.Node] = set()  # sizes read from inputs or computed from such sizes
    computed: dict[Any, fx.Node] = {}
    for node in filter(computes_size, graph.nodes):
        if isinstance(_value(node), torch.SymFloat | torch.SymBool):
            continue  # comparing these would make numbers of the sizes
        size = expression(_value(node))
        if size in sizes and node.target is aten.sym_size.int:
            node.args = sizes[size]
            known.add(node)
        elif size in computed:
            node.replace_all_uses_with(computed[size])
        elif known.issuperset(node.all_input_nodes):
            computed[size] = node
            known.add(node)
    return sizes


def _repeats(order: Sequence[fx.Node]) -> list[Stretch]:
    index = {node: at for at, node in enumerate(order)}

    def choose(stretches: list[Stretch]) -> Stretch | None:
        turned = (_turned(order, index, each) for each in _longest(stretches))
        best = max(filter(None, turned), key=lambda each: each.saved, default=None)
        return best if best is not None and best.saved >= _OF_ONE else None

    return repetitions([_text(node, {}) for node in order], choose, _LEAST_PERIOD)


def _longest(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the first stretches, without those that only join periods of an earlier one."""
    found: list[Stretch] = []
    for each in stretches:
        joins = any(
            each.period % before.period == 0 and each.start < before.end and before.start < each.end
            for before in found
        )
        if not joins:
            found.append(each)
        if len(found) == _LONGEST:
            break
    return found


def _turned(
    order: Sequence[fx.Node], index: Mapping[fx.Node, int], stretch: Stretch
) -> Stretch | None:
    """Choose where a repetition starts: as often as possible, then before a product, then where
    the fewest bytes are passed on.
    """
    start, period, end = stretch
    best, least = None, (0, True, math.inf)
    for first in range(start, min(start + period, end - 2 * period + 1)):
        border, count = first + period, (end - first) // period
        handed = {
            base
            for node in order[border : border + period]
            for base in map(_base, _operands(node))
            if first <= index.get(base, -1) < border
        }
        values = [_value(node) for node in handed]
        if all(isinstance(value, torch.Tensor) for value in values):
            size = sum(map(_bytes, values))
            cost = (-count, order[first].target not in _PRODUCTS, size)
            if cost < least:
                best, least = Stretch(first, period, first + count * period), cost
    return best


def _is_part(node: fx.Node) -> bool:
    """Return whether the node is a part of an input. A piece that does not write it gets
    it as a view.
    """
    return node.target in _PARTS and node.all_input_nodes[0].op == "placeholder"


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node reads, without sizes."""
    return [each for each in node.all_input_nodes if not computes_size(each)]


def _bytes(value: torch.Tensor) -> int:
    return hint(value.numel()) * value.itemsize


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_whole(node: fx.Node) -> bool:
    """Return whether a view is all of a computed value in another shape. Pieces get the value in
    that shape.
    """
    base = _base(node)
    both = _value(node), _value(base)
    alike = len({(expression(value.numel()), value.dtype) for value in both}) == 1
    plain = all(_is_row_major(value) and not value.is_complex() for value in both)
    return base.op != "placeholder" and alike and plain


def _is_part_of_value(node: fx.Node) -> bool:
    """Return whether a node is a part of a computed value, such as the gradient of one step. Pieces
    get such a part as a view, because its index would make a difference between them.
    """
    base, view = _base(node), node
    while view is not base:
        if view.target not in _VIEWS:
            return False
        view = view.args[0]  # type: ignore[assignment]
    value = _value(base)
    is_plain = isinstance(value, torch.Tensor) and _is_row_major(value) and not value.is_complex()
    return node.target in _SELECTING and base.op == "call_function" and is_plain


def _is_row_major(value: torch.Tensor) -> bool:
    if not size_symbols(value):
        return value.is_contiguous()
    strides: list[Any] = [1]
    for size in reversed(value.shape[1:]):
        strides.append(strides[-1] * size)
    return same_sizes(value.stride(), strides[::-1])


def _is_view(node: fx.Node) -> bool:
    """Return whether the node is a view that costs nothing, so that it is made again where
    it is used.
    """
    single = isinstance(_value(node), torch.Tensor) and len(_operands(node)) == 1
    is_call = node.op == "call_function" and isinstance(node.target, Operator)
    return is_call and single and may_view(node) and isinstance(node.args[0], fx.Node)


class _Interval:
    """Operators that run together. Views of their inputs are copied to the piece."""

    def __init__(self, nodes: Sequence[fx.Node], repeated: bool) -> None:
        self.nodes, self.own, self.repeated = nodes, set(nodes), repeated
        self.written = {n.args[0] for n in nodes if n.target is aten.copy_.default}
        self.graph = fx.Graph()
        # from nodes of the whole graph to their placeholders
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.writes: list[tuple[fx.Node, fx.Node]] = []  # placeholder, value
        for node in nodes:
            if node.target is aten.copy_.default and node.args[0].op == "placeholder":  # type: ignore[union-attr]
                target, value = node.args
                self.writes.append((self._get(target), self._get(value)))  # type: ignore[arg-type]
            elif not self._is_given_part(node):
                self._copy(node)

    def _is_given_part(self, node: fx.Node) -> bool:
        return self.repeated and _is_part(node) and node.args[0] not in self.written

    def _is_part_of_earlier(self, node: fx.Node) -> bool:
        return self.repeated and _is_part_of_value(node) and _base(node) not in self.own

    def _get(self, node: fx.Node) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        is_view = _is_view(node) and not _is_whole(node) and not self._is_part_of_earlier(node)
        is_made_again = computes_size(node) or is_view
        if (node not in self.own and not is_made_again) or self._is_given_part(node):
            last = next(reversed(self.inputs.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before():
                given = placeholder(self.graph, f"given_{len(self.inputs)}")
            given.meta["val"] = _value(node)
            self.inputs[node] = self.copies[node] = given
            return given
        return self._copy(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        for argument in node.all_input_nodes:
            self._get(argument)
        self.copies[node] = copy_node(self.graph, node, self.copies)
        return self.copies[node]

    def know_sizes(self, inputs: _Sizes) -> None:
        """Let the piece have an input for each symbol, with a dimension of this size."""
        used = {each for node in self.copies for each in size_symbols(_value(node))}
        given = (expression(size) for node in self.inputs for size in _value(node).shape)
        for each in sorted(used.difference(given), key=str):
            self._get(inputs[each][0])

    def piece(self, results: Sequence[fx.Node]) -> Piece:
        given = {node: at for at, node in enumerate(self.inputs.values())}
        values = [value for _, value in self.writes]
        self.graph.output((*(self.copies[node] for node in results), *values))
        self.graph.eliminate_dead_code()
        module = graph_module({}, self.graph)
        places = tuple(given[target] for target, _ in self.writes)
        return Piece(module, places, tuple(node.meta["val"] for node in self.inputs))


class _Cutter:
    def __init__(
        self,
        module: fx.GraphModule,
        order: Sequence[fx.Node],
        repeats: Sequence[Stretch],
        sizes: _Sizes,
    ) -> None:
        self.given = module.graph.find_nodes(op="placeholder")
        self.sizes = sizes
        self.returned: Sequence[fx.Node] = module.graph.output_node().args[0]  # type: ignore[assignment]
        self.intervals: list[_Interval] = []
        self.groups: list[list[_Interval]] = []  # intervals that must return the same
        done = 0
        for repeat in (*repeats, Stretch(len(order), 1, len(order))):
            if repeat.start > done:
                self.groups.append([_Interval(order[done : repeat.start], repeated=False)])
            done = repeat.end
            starts = range(repeat.start, done, repeat.period)
            self.groups.append(
                [_Interval(order[at : at + repeat.period], repeated=True) for at in starts]
            )

    def chain(self) -> PieceChain | None:
        intervals = [*itertools.chain(*self.groups)]
        for each in intervals:
            each.know_sizes(self.sizes)
        given = {node for each in intervals for node in each.inputs}
        handed = {_base(n) for n in given if n.op != "placeholder" and not _is_part(n)}
        handed |= set(self.returned)
        if any(
            storage_root(node).op == "placeholder" or not isinstance(_value(node), torch.Tensor)
            for node in handed
        ):
            return None
        slots = {node: at for at, node in enumerate(self.given)}
        pieces: dict[str, int] = {}
        distinct: list[Piece] = []
        calls: list[PieceCall] = []
        for group in self.groups:
            places = sorted(
                {at for each in group for at, n in enumerate(each.nodes) if n in handed}
            )
            for each in group:
                results = [each.nodes[at] for at in places]
                slots |= {node: len(slots) + at for at, node in enumerate(results)}
                piece = each.piece(results)
                if (
                    not results and not piece.places
                ):  # only views, which are made where they are used
                    continue
                number = pieces.setdefault(piece.signature(), len(pieces))
                if number == len(distinct):
                    distinct.append(piece)
                inputs = tuple(_part(node, slots) for node in each.inputs)
                calls.append(PieceCall(number, inputs, tuple(slots[n] for n in results)))
        returned = tuple(Argument(slots[node]) for node in self.returned)
        sizes = {each: (slots[_base(node)], dim) for each, (node, dim) in self.sizes.items()}
        return PieceChain(
            tuple(distinct), tuple(calls), returned, len(self.given), len(slots), sizes
        )


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _part(node: fx.Node, slots: Mapping[fx.Node, int]) -> Argument:
    if node in slots:
        return Argument(slots[node])
    value = _value(node)
    offset = expression(value.storage_offset())
    if _is_part_of_value(node):
        offset = expression(_value(_base(node)).storage_offset()) - offset - 1
    elif not _is_part(node) or node.target is aten.alias.default:
        offset = -1
    sizes, strides = (tuple(map(expression, each)) for each in (value.shape, value.stride()))
    return Argument(slots[_base(node)], (sizes, strides, offset))
