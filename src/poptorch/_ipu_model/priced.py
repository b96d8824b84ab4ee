"""The passes of a staged program with their prices: what one run of each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .._ir.blocks import StagePass
from .._ir.graph import Graph
from .._ir.plan import Staged
from .._ir.program import Emit
from .._ir.slots import Kind, Slot
from .._ir.spec import Location, Locations, Spec
from .cycles import Chip
from .inside import Inside, Known
from .links import Fabric
from .sizes import slot_bytes

_RESULTS = (Kind.LOSS, Kind.OUTPUT, Kind.ANCHOR)


@dataclass(frozen=True, eq=False)
class PassPrice:
    """What one run of a pass takes on its chip.

    Attributes:
        inside: cycles and memory of the chip itself.
        from_host, to_host: bytes of one replica.
        streamed: bytes between the chip and streaming memory, besides the schedule's own loads.
    """

    inside: Inside
    from_host: float
    to_host: float
    streamed: float


@dataclass(frozen=True, eq=False)
class Subject:
    """What is priced.

    Attributes:
        staged: the program, pass by pass.
        known: what has been found out about its passes; shared by variants with the same passes.
        spec: every setting.
        emit: what goes back to the host.
        chip: what the prices inside a chip depend on.
        fabric: what joins the chips.
        rows: of the combined batches of all processes.
        flops: of one micro-batch, forward and backward, nothing computed twice.
        overlapped: whether inputs and outputs travel while the chips compute.
        proportions: of a tile that one product may use, on chips that have their own.
    """

    staged: Staged
    known: Known
    spec: Spec
    emit: Emit
    chip: Chip
    fabric: Fabric
    rows: int
    flops: int
    overlapped: bool = False
    proportions: Mapping[int, float] = field(default_factory=dict)

    def chip_of(self, stage_pass: StagePass) -> Chip:
        """Return the chip that a pass runs on."""
        own = self.proportions.get(self.staged.workload.chip_of(stage_pass))
        return self.chip if own is None else replace(self.chip, proportion=own)

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
    per_call = subject.spec.loops.micro_batches
    returned = sum(
        slot_bytes(slot) * subject.emit.count(slot.key, subject.spec.loops) / per_call
        for slot in graph.outputs
        if slot.kind in _RESULTS
    )
    synthetic = subject.spec.target.synthetic_data
    chip, divided = subject.chip_of(stage_pass), _update_shares(stage_pass, subject)
    return PassPrice(
        subject.known.inside(stage_pass, chip, divided),
        0 if synthetic else sum(slot_bytes(s) for s in graph.inputs if s.kind is Kind.BATCH),
        0 if synthetic else returned,
        _streamed(stage_pass, graph, subject),
    )


def _update_shares(stage_pass: StagePass, subject: Subject) -> int:
    """Replicas among which the update is divided: each updates the weights whose state it holds."""
    sharded = stage_pass.is_update and subject.spec.locations.optimizer.sharded
    return subject.fabric.replicas if sharded else 1


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
    graphs: Mapping[StagePass, Graph] = subject.staged.graphs
    forward = [p for p in graphs if not p.backward and not p.is_update]
    made = {s.key: s for p in forward for s in graphs[p].outputs if s.kind is Kind.VALUE}
    seeds = {key for p in forward for key in subject.known.seeded(p)}
    own = graphs[stage_pass].inputs if stage_pass.backward else graphs[stage_pass].outputs
    backward = {
        slot.key
        for p, graph in graphs.items()
        if p.backward
        for slot in graph.inputs
        if slot.kind is Kind.VALUE
    }
    return [s for s in own if s.key in made and s.key in backward and s.key not in seeds]
