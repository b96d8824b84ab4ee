"""The optimizer's update -> one segment per chip and round of exchange.

Weights, their accumulators and their moments are updated where the weight lives. What depends on
several chips, such as the norm of all gradients, is computed on one of them and sent to the others.
Step counts and hyper-parameters are on every chip.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from .._ir.graph import Graph
from .._ir.schedule import Do, Part
from .._ir.slot import Kind, Slot
from .._ir.staged import Segment
from .cutting import Cutter

Homes = Mapping[str, tuple[int, ...]]


def update_homes(graph: Graph, weights: Homes) -> dict[str, tuple[int, ...]]:
    """Return the chips of every tensor that the update reads or writes, by slot key.

    Args:
        graph: the update.
        weights: homes of the parameters, by slot key.
    """
    slots = {slot.key: slot for slot in (*graph.inputs, *graph.outputs)}
    owners = {key: _weight_of(slot, weights) for key, slot in slots.items()}
    chips = tuple(sorted({weights[owner][0] for owner in owners.values() if owner}))
    return {key: weights[owner][:1] if owner else chips for key, owner in owners.items()}


def _weight_of(slot: Slot, weights: Homes) -> str | None:
    """``optstate.momentum.fc.weight`` belongs to ``param.fc.weight``; None: it has no owner."""
    tail = slot.path
    while tail:
        if f"{Kind.PARAM}.{tail}" in weights:
            return f"{Kind.PARAM}.{tail}"
        tail = tail.partition(".")[2]
    return None


def split_update(graph: Graph, homes: Homes) -> dict[Part, Segment]:
    """Cut the update into its parts, in the order of rounds and chips."""
    places = _Places(graph, homes)
    used = sorted({*places.of_node.values(), *places.of_state()})
    numbers = {place: number for number, place in enumerate(used)}
    parts = {n: Part(Do.UPDATE, chip, rounds) for (rounds, chip), n in numbers.items()}
    last = {chip: numbers[rounds, chip] for rounds, chip in used}
    free = places.everywhere
    groups = {node: numbers[place] for node, place in places.of_node.items()}
    copies = {
        slot.key: [last[chip] for chip in homes[slot.key] if chip in last]
        for slot, node in zip(graph.outputs, graph.returned, strict=True)
        if node in free
    }

    def fallback(slot: Slot) -> int:
        return last[homes[slot.key][0]]

    cutter = Cutter(graph, groups, lambda node, _: node in free, copies, fallback)
    graphs = cutter.cut({number: str(part) for number, part in parts.items()})
    return {parts[n]: Segment(parts[n], parts[n].index, made) for n, made in graphs.items()}


class _Places:
    """Where every node of an update runs: (round, chip); or everywhere."""

    def __init__(self, graph: Graph, homes: Homes) -> None:
        self._graph = graph
        self._homes = homes
        self.of_node: dict[fx.Node, tuple[int, int]] = {}
        self.everywhere: set[fx.Node] = set()
        single = {
            node: homes[slot.key][0]
            for node, slot in zip(graph.placeholders, graph.inputs, strict=True)
            if self._weight_bound(slot)
        }
        for node in graph.module.graph.nodes:
            if node.op != "call_function":
                continue
            inputs = [(0, single[i]) for i in node.all_input_nodes if i in single]
            inputs += [self.of_node[i] for i in node.all_input_nodes if i in self.of_node]
            if not inputs:
                self.everywhere.add(node)
                continue
            # The latest input decides the chip, so that results are not sent to and fro.
            latest = max(rounds for rounds, _ in inputs)
            chip = self._chip(node, [chip for rounds, chip in inputs if rounds == latest], single)
            self.of_node[node] = max(rounds + (c != chip) for rounds, c in inputs), chip

    def _weight_bound(self, slot: Slot) -> bool:
        return len(self._homes[slot.key]) == 1 and slot.kind is not Kind.HYPER

    def _chip(self, node: fx.Node, latest: list[int], single: Mapping[fx.Node, int]) -> int:
        """Next to the state that it reads; else where its latest inputs are."""
        state = [single[i] for i in node.all_input_nodes if i in single]
        return min(state or latest)

    def of_state(self) -> set[tuple[int, int]]:
        """Places of updated state that no operator computes: a round on each of its chips."""
        chips = {chip for _, chip in self.of_node.values()}
        pairs = zip(self._graph.outputs, self._graph.returned, strict=True)
        alone = {
            chip
            for slot, node in pairs
            if node not in self.of_node and slot.is_state
            for chip in self._homes[slot.key][:1]
        }
        return {(0, chip) for chip in alone - chips}
