"""Placed micro graph -> one graph for the forward and one for the backward pass of every stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from .._ir.blocks import StagePass, is_kept, pass_of, stage_passes
from .._ir.graph import Graph
from .._ir.operators import draws, may_view
from .._ir.plan import Layout
from .._ir.slots import Kind, Slot
from .cutting import Cutter
from .homes import find_homes
from .passes import completed


def split(
    graph: Graph, layout: Layout, training: bool, recompute: bool
) -> tuple[dict[StagePass, Graph], dict[str, tuple[int, ...]]]:
    """Cut a micro graph into the passes that its labels name.

    Args:
        graph: that of the layout, or one that it was joined with others to.
        layout: of what is cut.
        training: whether there is a backward pass.
        recompute: whether backward passes compute activations again from what their stage was
            given, rather than keep them. What was drawn at random is kept, and so is what the
            user wants kept; the last stage, which goes back at once, keeps everything behind the
            last of these.

    Returns:
        The graphs in the order of execution, and the chips of all state that they read.
    """
    graph = completed(graph, len(layout.stages))
    homes = find_homes(graph, layout.stages)
    placed = {n: where for n in graph.module.graph.nodes if (where := pass_of(n)) is not None}
    free = _free(graph, placed)
    again = _recomputable(placed, len(layout.stages)) if recompute else {}

    def inline(node: fx.Node, stage_pass: StagePass) -> bool:
        chip = layout.stages[stage_pass.stage].chip
        if node in free and all(chip in homes[key] for key in free[node]):
            return True
        return stage_pass.backward and again.get(node) == stage_pass.stage

    passes = stage_passes(len(layout.stages), training)

    def fallback(slot: Slot) -> StagePass:
        """For an output that is an input as it came: where that input is."""
        returned = dict(zip((s.key for s in graph.outputs), graph.returned, strict=True))
        source = dict(zip(graph.placeholders, graph.inputs, strict=True))[returned[slot.key]]
        if source.kind is Kind.BATCH:
            return passes[0]
        return next(p for p in passes if layout.stages[p.stage].chip in homes[source.key])

    return Cutter(graph, placed, inline, {}, fallback).cut(passes), homes


def _free(graph: Graph, placed: Collection[fx.Node]) -> dict[fx.Node, frozenset[str]]:
    """Nodes that any pass may make for itself, with the state tensors that they are views of.

    These are views of inputs that forward leaves alone, and tensors that are made of nothing.
    """
    changed = graph.updates
    free: dict[fx.Node, frozenset[str]] = {
        node: frozenset({slot.key} if slot.is_state else ())
        for node, slot in zip(graph.placeholders, graph.inputs, strict=True)
        if slot.key not in changed
    }
    for node in placed:
        inputs = node.all_input_nodes
        viewing = bool(inputs) and may_view(node) and all(i in free for i in inputs)
        if viewing or (not inputs and not draws(node) and not node.is_impure()):
            free[node] = frozenset[str]().union(*(free[i] for i in inputs))
    return free


def _recomputable(placed: Mapping[fx.Node, StagePass], stages: int) -> dict[fx.Node, int]:
    """Forward nodes that backward passes may compute again, with their stage.

    Source for the last stage: PopART (MIT), willow/src/transforms/pipeline.cpp, which keeps what
    lies between the final checkpoints and the loss.
    """
    last = stages - 1
    before = _before_checkpoints([n for n, where in placed.items() if where == StagePass(last)])
    again = {}
    for node, stage_pass in placed.items():
        made_at_random = any(draws(source) for source in (node, *node.all_input_nodes))
        at_once = stage_pass.stage == last and node not in before
        if stage_pass.backward or at_once or made_at_random or is_kept(node):
            continue
        if not node.is_impure():
            again[node] = stage_pass.stage
    return again


def _before_checkpoints(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Of nodes in the order of execution those from which one that the user wants kept follows."""
    own, before = set(nodes), set[fx.Node]()
    for node in reversed(nodes):
        if is_kept(node) or node in before:
            before.update(source for source in node.all_input_nodes if source in own)
    return before
