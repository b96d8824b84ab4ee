"""The passes of a staged program with their prices: what one run of each takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from .._ir.blocks import label_of, line_of, pass_of
from .._ir.graph import Graph
from .._ir.operators import aten
from .._ir.placement import Location, Locations
from .._ir.program import Emit
from .._ir.slot import Kind, Slot
from .._ir.spec import Spec
from .._ir.stage_pass import StagePass
from .._ir.staged import Staged
from .cycles import FREE, Chip, Cost, cost
from .links import Fabric
from .loops import loops_of
from .sizes import slot_bytes
from .transient import Transient, accumulating, seeded_values, transient
from .work import NOTHING, Work, tensors, work_of

_RESULTS = (Kind.LOSS, Kind.OUTPUT, Kind.ANCHOR)


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
class PassPrice:
    """What one run of a pass takes on its chip.

    Attributes:
        cost: cycles.
        transient: memory while it runs.
        operators: what the cycles are spent on.
        from_host, to_host: bytes of one replica.
        streamed: bytes between the chip and streaming memory, besides the schedule's own loads.
        works: different operators: what there is code for.
    """

    cost: Cost
    transient: Transient
    operators: tuple[Operator, ...]
    from_host: float
    to_host: float
    streamed: float
    works: frozenset[Work]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is priced.

    Attributes:
        staged: the program, pass by pass.
        spec: every setting.
        emit: what goes back to the host.
        chip: what the prices inside a chip depend on.
        fabric: what joins the chips.
        rows: of the combined batches of all processes.
        flops: of one micro-batch, forward and backward, nothing computed twice.
        overlapped: whether inputs and outputs travel while the chips compute.
    """

    staged: Staged
    spec: Spec
    emit: Emit
    chip: Chip
    fabric: Fabric
    rows: int
    flops: int
    overlapped: bool = False
    works: dict[fx.Node, Work] = field(default_factory=dict)

    def with_constants(self, **changes: float) -> Subject:
        """Return the same with other constants."""
        constants = replace(self.chip.constants, **changes)
        return replace(
            self,
            chip=replace(self.chip, constants=constants),
            fabric=replace(self.fabric, constants=constants),
        )

    @property
    def flushes(self) -> int:
        """How often a call goes through the schedule."""
        return self.spec.loops.iterations if self.spec.training else 1


def location_of(slot: Slot, locations: Locations) -> Location:
    """Return where a state tensor rests."""
    return {
        Kind.PARAM: locations.weight,
        Kind.OPTSTATE: locations.optimizer,
        Kind.ACCUM: locations.accumulator,
    }.get(slot.kind, Location())


def off_chip(slot: Slot, locations: Locations) -> bool:
    """Tell whether a state tensor rests in streaming memory."""
    where = location_of(slot, locations)
    return not where.on_chip and slot.numel >= max(where.min_off_chip or 0, 2)


def price_passes(subject: Subject) -> dict[StagePass, PassPrice]:
    """Return the price of every pass."""
    return {each: _price(each, graph, subject) for each, graph in subject.staged.graphs.items()}


def _price(stage_pass: StagePass, graph: Graph, subject: Subject) -> PassPrice:
    chip, works = subject.chip, _works(graph, subject)
    per_call = subject.spec.loops.micro_batches
    returned = sum(
        slot_bytes(slot) * subject.emit.count(slot.key, subject.spec.loops) / per_call
        for slot in graph.outputs
        if slot.kind in _RESULTS
    )
    synthetic = subject.spec.target.synthetic_data
    total = FREE
    for work in works.values():
        total += cost(work, chip)
    return PassPrice(
        total,
        transient(graph, works, chip),
        tuple(_operators(works, chip)),
        0 if synthetic else sum(slot_bytes(s) for s in graph.inputs if s.kind is Kind.BATCH),
        0 if synthetic else returned,
        _streamed(stage_pass, graph, subject),
        frozenset(works.values()),
    )


def _works(graph: Graph, subject: Subject) -> dict[fx.Node, Work]:
    """What the nodes of a pass ask for; updates of state are one loop over each tensor."""
    pairs = zip(graph.outputs, graph.returned, strict=True)
    state = {node: slot.kind for slot, node in pairs if slot.is_state}
    fused = accumulating(graph)
    works = {}
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        work = subject.works.get(node)
        if work is None:
            work = work_of(node, subject.chip.half_partials)
            if node in fused and work.cycles:
                work = _fused(node, work, state)
            subject.works[node] = work
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


def _operators(works: Mapping[fx.Node, Work], chip: Chip) -> list[Operator]:
    counts = Counter((_name(node), label_of(node).module, work) for node, work in works.items())
    lines = {(_name(n), label_of(n).module): n for n in works}
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


def _streamed(stage_pass: StagePass, graph: Graph, subject: Subject) -> float:
    """Bytes of state that a pass fetches from streaming memory and takes back.

    Phased strategies have actions of their own for that.
    """
    spec = subject.spec
    if spec.placement.phased:
        return 0.0
    total = 0.0
    for direction in (graph.inputs, graph.outputs):
        for slot in direction:
            if slot.is_state and off_chip(slot, spec.locations):
                total += slot_bytes(slot) / shares(slot, subject)
    if not spec.locations.activation.on_chip and not stage_pass.is_update:
        total += sum(slot_bytes(slot) for slot in waiting_values(stage_pass, subject))
    return total


def shares(slot: Slot, subject: Subject) -> int:
    """Return over how many replicas a state tensor is spread."""
    sharded = location_of(slot, subject.spec.locations).sharded and slot.numel > 1
    return subject.fabric.replicas if sharded else 1


def waiting_values(stage_pass: StagePass, subject: Subject) -> list[Slot]:
    """Return what waits for the backward pass, of what a pass makes or reads back."""
    graphs = subject.staged.graphs
    forward = [p for p in graphs if not p.backward and not p.is_update]
    made = {s.key: s for p in forward for s in graphs[p].outputs if s.kind is Kind.VALUE}
    seeds = {key for p in forward for key in seeded_values(graphs[p])}
    own = graphs[stage_pass].inputs if stage_pass.backward else graphs[stage_pass].outputs
    backward = {
        slot.key
        for p, graph in graphs.items()
        if p.backward
        for slot in graph.inputs
        if slot.kind is Kind.VALUE
    }
    return [s for s in own if s.key in made and s.key in backward and s.key not in seeds]
