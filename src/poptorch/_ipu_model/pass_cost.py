"""Compute what one run of a pass costs inside its chip, in all variants of a program: cycles and
memory.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from .._base import source
from .._cost.live_bytes import alive_bytes, tensors
from .._cost.operations import flops_of, is_product, right_operand
from .._ir.block_labels import StagePass, label_of, line_of, pass_of
from .._ir.graph import Graph
from .._ir.operators import aten, is_mask, may_view, name_of
from .._ir.slots import Kind
from .cycles import FREE, Cost, cost, node_bytes
from .element_cycles import cycles_per_element
from .parts import OperatorEstimate
from .product_planner import ChipModel, spread
from .work import (
    NOTHING,
    Halves,
    Work,
    is_conversion_of_product,
    is_identity,
    weight_of,
    work_of,
)

Works = Mapping[fx.Node, Work]


@dataclass(frozen=True, eq=False)
class PassCost:
    cost: Cost
    values: float  # bytes of its own values at its fullest moment
    temporary: float  # additional bytes for the operator of that moment
    fullest: fx.Node | None  # that operator; None in an empty pass
    operators: tuple[OperatorEstimate, ...]
    works: frozenset[Work]  # different operators, each of which needs code
    blocks: Mapping[str, float]  # share of each weight on a tile, by path

    @property
    def bytes(self) -> float:
        return self.values + self.temporary


class PricedPass:
    def __init__(self, stage_pass: StagePass, graph: Graph) -> None:
        self._stage_pass, self._graph = stage_pass, graph
        self._held: dict[fx.Node, int] | None = None  # bytes while its operators run, in order
        self._works: dict[Halves, Works] = {}
        self._costs: dict[object, PassCost] = {}

    def works(self, halves: Halves) -> Works:
        if halves not in self._works:
            self._works[halves] = _works(self._graph, halves)
        return self._works[halves]

    def cost(self, chip: ChipModel, shares: int = 1) -> PassCost:
        key = chip.inside, shares
        if key not in self._costs:
            works = self.works(chip.half_partials)
            own = _divided(works, shares)
            total = FREE
            for work, count in Counter(own.values()).items():
                total = total.plus(cost(work, chip).times(count))
            blocks = {} if self._stage_pass.backward else _blocks(self._graph, works, chip)
            fullest = self._fullest(works, chip, shares)
            operators = tuple(self._operators(own, chip))
            self._costs[key] = PassCost(total, *fullest, operators, frozenset(own.values()), blocks)
        return self._costs[key]

    @cached_property
    def seeded(self) -> set[str]:
        """Return keys of values that it passes on and that can be drawn again from a seed."""
        made = self._graph.results
        return {slot.key for slot, node in made if slot.kind is Kind.VALUE and is_mask(node)}

    def _fullest(
        self, works: Works, chip: ChipModel, shares: int
    ) -> tuple[float, float, fx.Node | None]:
        if self._held is None:
            self._held = _held_values(self._graph, works)
        most: tuple[float, float, fx.Node | None] = 0.0, 0.0, None
        for node, held in self._held.items():
            spreads = (spread(p, chip) for p in works.get(node, NOTHING).all_products)
            temporary = chip.tiles * max((each.bytes for each in spreads), default=0.0)
            if held / shares + temporary > most[0] + most[1]:
                most = held / shares, temporary, node
        return most

    def _operators(self, works: Works, chip: ChipModel) -> Iterator[OperatorEstimate]:
        rows: dict[tuple[str, str], dict[Work, int]] = defaultdict(Counter)
        lines: dict[tuple[str, str], tuple[str, int] | None] = {}
        flops = Counter[tuple[str, str]]()
        for node, work in works.items():
            key = name_of(node), label_of(node).path
            rows[key][work] += 1
            lines[key] = line_of(node)
            flops[key] += flops_of(node)
        for (name, module), counts in rows.items():
            spent = FREE
            for work, count in counts.items():
                spent = spent.plus(cost(work, chip).times(count))
            line = lines[name, module]
            yield OperatorEstimate(
                str(self._stage_pass), 0, name, module,
                source.describe(*line) if line else "", sum(counts.values()),
                spent.compute, spent.exchange, spent.sync,
                flops[name, module],
            )  # fmt: skip


def _works(graph: Graph, halves: Halves) -> Works:
    """Return what the nodes of a pass need. Updates of state are one loop over each tensor."""
    state = {node for slot, node in graph.results if slot.is_state}
    fused = _accumulating(graph)
    works = {}
    for node in graph.module.graph.nodes:
        work = work_of(node, halves)
        if node in fused and work.cycles:
            work = _fused(node, work, node in state)
        if work != NOTHING:
            works[node] = work
    return works


def _fused(node: fx.Node, work: Work, is_state: bool) -> Work:
    """Merge work: one loop updates a tensor, including conversions; an accumulator takes
    one addition.
    """
    cycles = work.cycles
    direction = pass_of(node)
    if direction is not None and not direction.is_update:
        value = tensors(node)[0]
        each = cycles_per_element("add", value.element_size()) if is_state else 0.0
        cycles = each * value.numel()
    elif node.target is aten._to_copy.default:
        cycles = 0.0
    return replace(work, cycles=cycles, steps=int(is_state), moved=0)


def _divided(works: Works, shares: int) -> Works:
    if shares == 1:
        return works
    made = {
        work: replace(work, cycles=work.cycles / shares, moved=work.moved // shares)
        for work in set(works.values())
    }
    return {node: made[work] for node, work in works.items()}


def _accumulating(graph: Graph) -> set[fx.Node]:
    """Return the element-wise operators on which only state depends."""
    results = {node for slot, node in graph.results if slot.is_state}
    other = {node for slot, node in graph.results if not slot.is_state}
    early: set[fx.Node] = set()
    for node in reversed(list(graph.module.graph.nodes)):
        if node.op != "call_function" or node in other or is_product(node):
            continue
        users = [user for user in node.users if user.op != "output"]
        if (node in results or users) and all(user in early for user in users):
            early.add(node)
    return early


def _blocks(graph: Graph, works: Works, chip: ChipModel) -> dict[str, float]:
    """Return the share of each weight on a tile that has a block of it, by path."""
    inputs = graph.arguments.items()
    weights = {node: slot.weight for node, slot in inputs if slot.kind is Kind.PARAM}
    made: dict[str, float] = {}
    for node, work in works.items():
        for product in work.products:
            source_node = weight_of(right_operand(node))
            if product.resident and source_node in weights:
                whole = product.groups * product.inner * product.columns * product.itemsize
                # Computed for many rows, because a larger batch does not move weights.
                many = replace(product, rows=8 * chip.tiles, taps=1)
                made.setdefault(weights[source_node], spread(many, chip).block / whole)
    return made


def _held_values(graph: Graph, works: Works) -> dict[fx.Node, int]:
    """Return the bytes of values: element-wise operators overwrite unused operands, and masks are
    drawn again from seeds.
    """
    order = list(_in_demand(graph))
    streamed = _never_whole(graph)
    sizes = {node: 0 if node in streamed else _own_bytes(node) for node in order}
    sizes |= {node: 0 for slot, node in graph.results if slot.is_state}  # over the old value

    def in_place(node: fx.Node) -> bool:
        work = works.get(node, NOTHING)
        return bool(work.cycles) and not work.products and work.steps == 1

    owners = {node: _owner(node) for node in order}
    held = alive_bytes(order, owners, sizes, graph.returned, in_place)
    return dict(zip(order, held, strict=True))


def _in_demand(graph: Graph) -> Iterator[fx.Node]:
    """Yield operators when they are first needed: recomputed late, gradients added early."""
    nodes = graph.operators
    direction = graph.name.lstrip("0123456789")[:1]
    # One weight after another, if a pass updates them.
    placed = ((node, pass_of(node)) for node in nodes if direction != "U")
    own = [node for node, where in placed if where is not None and where.direction == direction]
    early = _accumulating(graph)
    done: set[fx.Node] = set()

    def is_there(node: fx.Node) -> bool:
        return node in done or node.op != "call_function"

    for target in (*own, *graph.returned, *nodes):
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [each for each in node.all_input_nodes if not is_there(each)]
            if missing and not is_there(node):
                stack += missing
                continue
            stack.pop()
            if is_there(node):
                continue
            done.add(node)
            yield node
            ready = (user for user in node.users if user in early and user not in done)
            stack += [user for user in ready if all(map(is_there, user.all_input_nodes))]


def _never_whole(graph: Graph) -> set[fx.Node]:
    """Return values inside the loop that updates a tensor. Only their present element exists."""
    inside = set()
    for node in _accumulating(graph):
        size = _elements(node)
        users = [user for user in node.users if user.op == "call_function"]
        if size > 1 and users and all(_elements(user) == size for user in users):
            inside.add(node)
    return inside


def _elements(node: fx.Node) -> int:
    return max((each.numel() for each in tensors(node)), default=0)


def _owner(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.all_input_nodes:
        source_node = node.args[0] if node.args else None
        # A conversion for a product is part of the product, unless it converts a result that is
        # stored.
        product = is_conversion_of_product(node) and all(map(is_product, node.users))
        shared = may_view(node) or is_identity(node) or product
        if not isinstance(source_node, fx.Node) or not shared:
            break
        if node.target is operator.getitem:
            break  # one of several results, each of which has its own memory
        node = source_node
    return node


_EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.zeros_like.default)


def _own_bytes(node: fx.Node) -> int:
    several = isinstance(node.meta.get("val"), list | tuple)  # results with their own nodes
    if several or node.target in _EMPTY or is_mask(node):
        return 0
    if is_product(node) and node.users and all(map(is_conversion_of_product, node.users)):
        return 0  # the conversion contains it
    return node_bytes(node)
