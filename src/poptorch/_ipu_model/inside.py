"""What one run of a pass takes inside its chip: cycles, operator by operator, and memory.

None of it depends on where tensors rest, on loop counts or on what joins the chips. So it is found
out once for all variants of a program that differ in those, and kept in a ``Known``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from .._ir.blocks import StagePass, label_of, line_of, pass_of
from .._ir.graph import Graph
from .._ir.operators import aten
from .._ir.slots import Kind
from .composites import work_of
from .cycles import FREE, Chip, Cost, cost
from .element_cycles import loops_of
from .tiles import blocks
from .transient import Course, Transient, accumulating, course, seeded_values
from .work import NOTHING, Halves, Work, tensors

Works = Mapping[fx.Node, Work]


@dataclass(frozen=True)
class Operator:
    """One kind of operator of one module in one pass, all its occurrences together.

    Attributes:
        name: of the operator.
        module: path of the module.
        line: the user's (file, line), or None.
        count: occurrences.
        cost: of all of them.
        flops: of all of them.
    """

    name: str
    module: str
    line: tuple[str, int] | None
    count: int
    cost: Cost
    flops: int


@dataclass(frozen=True, eq=False)
class Inside:
    """What one run of a pass takes inside its chip.

    Attributes:
        cost: cycles.
        transient: memory while it runs.
        operators: what the cycles are spent on.
        works: different operators: what there is code for.
        blocks: share of each weight that a tile holds, by its path.
    """

    cost: Cost
    transient: Transient
    operators: tuple[Operator, ...]
    works: frozenset[Work]
    blocks: Mapping[str, float]


class Known:
    """What has been found out about the passes of one program.

    Args:
        graphs: the passes.
    """

    def __init__(self, graphs: Mapping[StagePass, Graph]) -> None:
        self._graphs = graphs
        self._works: dict[object, Works] = {}
        self._courses: dict[StagePass, Course] = {}
        self._insides: dict[object, Inside] = {}
        self._seeded: dict[StagePass, set[str]] = {}

    def works(self, stage_pass: StagePass, half_partials: Halves) -> Works:
        """Return what the operators of a pass ask for.

        Args:
            stage_pass: which.
            half_partials: whether matrix products, and convolutions, add up in 16 bits.
        """
        key = stage_pass, half_partials
        if key not in self._works:
            self._works[key] = _works(self._graphs[stage_pass], half_partials)
        return self._works[key]

    def inside(self, stage_pass: StagePass, chip: Chip, shares: int = 1) -> Inside:
        """Return what one run of a pass takes.

        Args:
            stage_pass: which.
            chip: that it runs on.
            shares: replicas that each do a part of it.
        """
        key = stage_pass, chip.inside, shares
        if key not in self._insides:
            works = self.works(stage_pass, chip.half_partials)
            if stage_pass not in self._courses:
                self._courses[stage_pass] = course(self._graphs[stage_pass], works)
            own = _divided(works, shares)
            self._insides[key] = Inside(
                _total(own, chip),
                self._courses[stage_pass].fullest(works, chip, shares),
                tuple(_operators(own, chip)),
                frozenset(own.values()),
                blocks(self._graphs[stage_pass], works, chip) if not stage_pass.backward else {},
            )
        return self._insides[key]

    def seeded(self, stage_pass: StagePass) -> set[str]:
        """Return the keys of values that a pass hands on, of which a seed is enough."""
        if stage_pass not in self._seeded:
            self._seeded[stage_pass] = seeded_values(self._graphs[stage_pass])
        return self._seeded[stage_pass]


def _works(graph: Graph, half_partials: Halves) -> Works:
    """What the nodes of a pass ask for; updates of state are one loop over each tensor."""
    pairs = zip(graph.outputs, graph.returned, strict=True)
    state = {node: slot.kind for slot, node in pairs if slot.is_state}
    fused = accumulating(graph)
    works = {}
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        work = work_of(node, half_partials)
        if node in fused and work.cycles:
            work = _fused(node, work, state)
        if work != NOTHING:
            works[node] = work
    return works


def _fused(node: fx.Node, work: Work, state: Mapping[fx.Node, Kind]) -> Work:
    """One loop updates a tensor, conversions included; an accumulator takes one addition."""
    direction = pass_of(node)
    adds = direction is not None and not direction.is_update
    if adds:
        size = tensors(node)[0]
        cycles = loops_of("add", size.element_size()) * size.numel() if node in state else 0.0
        return replace(work, cycles=cycles, steps=int(node in state), moved=0)
    cycles = 0.0 if node.target is aten._to_copy.default else work.cycles
    return replace(work, cycles=cycles, steps=int(node in state), moved=0)


def _divided(works: Works, shares: int) -> Works:
    """The works of a pass whose loops are spread over replicas."""
    if shares == 1:
        return works
    made: dict[Work, Work] = {
        work: replace(work, cycles=work.cycles / shares, moved=work.moved // shares)
        for work in set(works.values())
    }
    return {node: made[work] for node, work in works.items()}


def _total(works: Works, chip: Chip) -> Cost:
    total = FREE
    for work, count in Counter(works.values()).items():
        total += cost(work, chip).times(count)
    return total


def _operators(works: Works, chip: Chip) -> list[Operator]:
    counts = Counter((_name(node), label_of(node).path, work) for node, work in works.items())
    lines = {(_name(n), label_of(n).path): n for n in works}
    merged: dict[tuple[str, str], Operator] = {}
    for (name, module, work), count in counts.items():
        price = cost(work, chip).times(count)
        before = merged.get((name, module))
        if before is None:
            line = line_of(lines[name, module])
            before = Operator(name, module, line, 0, FREE, 0)
        merged[name, module] = replace(
            before, count=before.count + count, cost=before.cost + price,
            flops=before.flops + work.flops * count,
        )  # fmt: skip
    return list(merged.values())


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet or getattr(node.target, "__name__", node.target))
