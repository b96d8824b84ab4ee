"""Layout -> one segment for the forward and one for the backward part of every stage."""

from __future__ import annotations

from torch import fx

from .._ir.blocks import is_kept
from .._ir.graph import Graph
from .._ir.layout import Layout
from .._ir.operators import draws, may_view
from .._ir.schedule import Do, Part
from .._ir.slot import Kind, Slot
from .._ir.staged import Segment
from .cutting import Cutter


def part_of_rank(rank: int, stages: int) -> Part:
    """Return the part that runs at a rank."""
    return Part(Do.FORWARD, rank) if rank < stages else Part(Do.BACKWARD, 2 * stages - 1 - rank)


def split(layout: Layout, recompute: bool) -> dict[Part, Segment]:
    """Cut the micro graph of a layout into its parts.

    Args:
        layout: where everything runs.
        recompute: whether backward parts compute activations again from what their stage was
            given, rather than keep them. What was drawn at random is kept, and so is what the
            user wants kept; the last stage, which goes back at once, keeps everything.

    Returns:
        The segments in the order of execution, without accumulators.
    """
    stages = len(layout.stages)
    parts = {rank: part_of_rank(rank, stages) for rank in range(layout.ranks)}
    chips = {rank: layout.stages[part.index].chip for rank, part in parts.items()}
    free = _free(layout)
    again = _recomputable(layout) if recompute else {}

    def inline(node: fx.Node, rank: int) -> bool:
        homes = free.get(node)
        if homes is not None and all(chips[rank] in layout.homes[key] for key in homes):
            return True
        part = parts[rank]
        return part.do is Do.BACKWARD and again.get(node) == part.index

    def fallback(slot: Slot) -> int:
        return _first_rank_at_home(layout, chips, slot)

    groups = {node: layout.rank(node) for node in layout.spots}
    cutter = Cutter(layout.graph, groups, inline, {}, fallback)
    graphs = cutter.cut({rank: str(part) for rank, part in parts.items()})
    return {parts[r]: Segment(parts[r], chips[r], graph) for r, graph in graphs.items()}


def _free(layout: Layout) -> dict[fx.Node, frozenset[str]]:
    """Nodes that any part may make for itself, with the state tensors that they are views of.

    These are views of inputs that forward leaves alone, and tensors that are made of nothing.
    """
    changed = layout.graph.updates
    found: dict[fx.Node, frozenset[str]] = {
        node: frozenset({slot.key} if slot.is_state else ())
        for node, slot in zip(layout.graph.placeholders, layout.graph.inputs, strict=True)
        if slot.key not in changed
    }
    for node in layout.spots:
        inputs = node.all_input_nodes
        viewing = bool(inputs) and may_view(node) and all(i in found for i in inputs)
        if viewing or (not inputs and not draws(node) and not node.is_impure()):
            found[node] = frozenset[str]().union(*(found[i] for i in inputs))
    return found


def _recomputable(layout: Layout) -> dict[fx.Node, int]:
    """Forward nodes that backward parts may compute again, with their stage."""
    found = {}
    last = len(layout.stages) - 1
    for node, spot in layout.spots.items():
        made_at_random = any(draws(before) for before in (node, *node.all_input_nodes))
        if spot.backward or spot.stage == last or made_at_random or is_kept(node):
            continue
        if not node.is_impure():
            found[node] = spot.stage
    return found


def _first_rank_at_home(layout: Layout, chips: dict[int, int], slot: Slot) -> int:
    """For an output that is an input as it came: where that input is."""
    graph: Graph = layout.graph
    returned = dict(zip((s.key for s in graph.outputs), graph.returned, strict=True))
    inputs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    source = inputs[returned[slot.key]]
    if source.kind is Kind.BATCH:
        return 0
    return next((rank for rank, chip in chips.items() if chip in layout.homes[source.key]), 0)
