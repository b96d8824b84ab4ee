"""Describe what is estimated: a staged program with its settings, its chips and their links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .._ir.block_labels import StagePass
from .._ir.plan import Staged
from .._ir.program import Emit
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from .constants import Constants
from .pass_cost import PassCost, PricedPass
from .product_planner import ChipModel

POD = 64  # largest number of chips connected by IPU-Links


@dataclass(frozen=True, eq=False)
class Subject:
    staged: Staged
    passes: Mapping[StagePass, PricedPass]  # shared by variants with the same passes
    spec: Spec
    emit: Emit  # what is returned to the host
    chip: ChipModel
    per_replica: int  # number of chips
    replicas: int  # in all processes
    rows: int  # rows of the combined batches of all processes
    flops: int  # for one micro-batch, forward and backward, without recomputation
    overlapped: bool = False  # inputs and outputs are transferred while the chips compute
    proportions: Mapping[int, float] = field(default_factory=dict)  # share of a tile's memory
    name: str = ""  # the model and its use

    @property
    def constants(self) -> Constants:
        return self.chip.constants

    def with_constants(self, **changes: float) -> Subject:
        return replace(self, chip=replace(self.chip, constants=replace(self.constants, **changes)))

    @property
    def clock(self) -> float:
        return self.chip.kind.clock_mhz * 1e6

    @property
    def flushes(self) -> int:
        return self.spec.loops.iterations if self.spec.training else 1

    def chip_of(self, stage_pass: StagePass) -> ChipModel:
        own = self.proportions.get(self.staged.workload.chip_of(stage_pass))
        return self.chip if own is None else replace(self.chip, proportion=own)

    def inside(self, stage_pass: StagePass) -> PassCost:
        """Return the cost of a pass inside its chip. A sharded update is divided: each replica
        updates the weights whose state it has.
        """
        divided = stage_pass.is_update and self.spec.locations.optimizer.sharded
        shares = self.replicas if divided else 1
        return self.passes[stage_pass].cost(self.chip_of(stage_pass), shares)

    def is_off_chip(self, slot: Slot) -> bool:
        return self.spec.locations.of(slot).off_chip(slot)

    def shares(self, slot: Slot) -> int:
        sharded = self.spec.locations.of(slot).sharded
        return self.replicas if sharded and slot.numel > 1 else 1

    def waiting_values(self, stage_pass: StagePass) -> list[Slot]:
        """Return values computed or read by a pass that wait for the backward pass."""
        graphs = self.staged.graphs
        forward = [p for p in graphs if not p.backward and not p.is_update]
        made = {s.key for p in forward for s in graphs[p].outputs if s.kind is Kind.VALUE}
        made -= {key for p in forward for key in self.passes[p].seeded}
        read = {
            s.key for p in graphs if p.backward for s in graphs[p].inputs if s.kind is Kind.VALUE
        }
        own = graphs[stage_pass].inputs if stage_pass.backward else graphs[stage_pass].outputs
        return [slot for slot in own if slot.key in made & read]

    # Seconds of transfers outside of a chip; sizes in bytes.

    @property
    def _link(self) -> float:
        return self.constants.link_bytes * self.constants.link_efficiency

    def sent(self, size: float) -> float:
        return size / self._link

    def all_gather(self, size: float) -> float:
        """Return seconds: a ring inside a pod over IPU-Links, then between pods over gateways."""
        inside = max(1, min(self.replicas, POD // self.per_replica))
        pods = math.ceil(self.replicas / inside)
        gateway = self.constants.gateway_bytes * self.constants.link_efficiency
        return self._ring(size, inside, self._link) + self._ring(size / inside, pods, gateway)

    def _ring(self, size: float, members: int, bandwidth: float) -> float:
        if members == 1 or not size:
            return 0.0
        return (members - 1) * (size / members / bandwidth + self.constants.collective_step)

    @property
    def _network(self) -> float:
        per_machine = max(1, self.chip.kind.per_board // self.per_replica)
        return self.constants.network_bytes / min(per_machine, self.replicas)

    def to_host(self, size: float) -> float:
        return size / min(self.constants.host_bytes, self._network)

    def from_host(self, size: float, meanwhile: float) -> float:
        """Return seconds for reading from the gateway what the machine fetches ``meanwhile``."""
        return max(size / self.constants.host_bytes, size / self._network - meanwhile)

    def streamed(self, size: float) -> float:
        return size / self.constants.streaming_bytes
