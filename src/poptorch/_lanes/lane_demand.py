"""Find out what differs between lanes in a graph, and what is needed with lanes or as a
sum over them.
"""

from __future__ import annotations

from torch import fx

from .._ir import slots
from .._ir.graph import Graph
from .._ir.micro_batches import Lanes
from .._ir.operators import acts, draws
from .._ir.plan import RESULTS
from .._ir.slots import MODEL_STATE, Kind
from .._ops.exchanges import exchange
from . import lane_sums
from .carried_buffers import Chain, reads


class Demand:
    """The values that are needed. A sum that can be computed inside products does not need its
    operand with lanes.
    """

    def __init__(self, graph: Graph, lanes: Lanes) -> None:
        self.graph, self.slots = graph, graph.arguments
        self.chains = self._find_chains()
        self.varying = self._find_varying(lanes)
        self.with_lanes: set[fx.Node] = set()  # needed with lanes
        self.summed: set[fx.Node] = set()
        self.unfolded: set[fx.Node] = set()  # gradients of weights are needed for each lane
        self._pushed: dict[fx.Node, bool] = {}
        self._find_nodes_with_lanes()

    def varies(self, node: fx.Node) -> bool:
        return node in self.varying

    def _find_chains(self) -> dict[fx.Node, Chain]:
        given = {slot.key: node for node, slot in self.slots.items()}
        return {
            given[slot.key]: Chain(f"{slot.kind} {slot.path}", given[slot.key], node)
            for slot, node in self.graph.results
            if slot.kind in MODEL_STATE
        }

    def _find_varying(self, lanes: Lanes) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node, slot in self.slots.items():
            replica = slot == slots.REPLICA and lanes.replicas > 1
            if slot.kind is Kind.BATCH or replica or node in self.chains:
                found.add(node)
        for node in self.graph.operators:
            own = draws(node) or node.target is exchange
            if own or not found.isdisjoint(reads(node)):
                found.add(node)
        return found

    def _find_nodes_with_lanes(self) -> None:
        for slot, node in self.graph.results:
            if slot.kind is Kind.GRADIENT:
                self.summed.add(node)
            elif slot.kind in RESULTS:
                self.with_lanes.add(node)
        self.with_lanes.update(filter(acts, self.graph.operators))
        for chain in self.chains.values():
            self.with_lanes.update(chain.operands())
        for node in reversed(self.graph.operators):
            if node not in self.varying:
                continue
            if (
                node in self.summed
                and node not in self.with_lanes
                and not self.is_computed_inside(node)
            ):
                self.with_lanes.add(node)
            if node in self.with_lanes:
                if lane_sums.sum_of(node, self.varies):
                    self.unfolded.add(node.all_input_nodes[0])
                self.with_lanes.update(reads(node))
            elif node in self.summed:
                self._add_sum(node)

    def _add_sum(self, node: fx.Node) -> None:
        if lane_sums.sum_of(node, self.varies) or lane_sums.contraction(node, self.varies):
            self.with_lanes.update(reads(node))
        else:
            self.summed.update(lane_sums.linear_in(node, self.varies))

    def is_computed_inside(self, node: fx.Node) -> bool:
        """Return whether a sum over lanes can be computed inside products or other sums."""
        if node not in self._pushed:
            linear = lane_sums.linear_in(node, self.varies)
            self._pushed[node] = bool(
                lane_sums.sum_of(node, self.varies)
                or lane_sums.contraction(node, self.varies)
                or (linear and all(map(self.is_computed_inside, linear)))
            )
        return self._pushed[node]
