"""The optimizer's update -> one graph per chip and round of exchange.

Weights, their accumulators and their moments are updated where the weight lives. What depends on
several chips, such as the norm of all gradients, is computed on one of them and sent to the others.
Step counts and hyper-parameters are on every chip.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from .._ir.blocks import Direction, StagePass
from .._ir.graph import Graph
from .._ir.slots import Kind, Slot
from .cutting import Cutter

Homes = Mapping[str, tuple[int, ...]]


def update_homes(graph: Graph, weights: Homes) -> dict[str, tuple[int, ...]]:
    """Return the chips of every tensor that the update reads or writes, by slot key.

    Args:
        graph: the update.
        weights: homes of the parameters, by slot key.
    """
    slots = {slot.key: slot for slot in (*graph.inputs, *graph.outputs)}
    homes = {s.weight: weights[s.key][:1] for s in slots.values() if s.kind is Kind.PARAM}
    chips = tuple(sorted({chip for home in homes.values() for chip in home}))
    return {key: homes.get(slot.weight, chips) for key, slot in slots.items()}


def split_update(graph: Graph, homes: Homes) -> dict[StagePass, Graph]:
    """Cut the update into its passes, in the order of rounds and chips."""
    placed, everywhere = _placed(graph, homes)
    passes = {*placed.values(), *_of_state_alone(graph, placed, homes)}
    last = {each.stage: each for each in sorted(passes)}
    copies = {
        slot.key: [last[chip] for chip in homes[slot.key] if chip in last]
        for slot, node in zip(graph.outputs, graph.returned, strict=True)
        if node in everywhere
    }

    def inline(node: fx.Node, _: StagePass) -> bool:
        return node in everywhere

    def fallback(slot: Slot) -> StagePass:
        return last[homes[slot.key][0]]

    return Cutter(graph, placed, inline, copies, fallback).cut(passes)


def _placed(graph: Graph, homes: Homes) -> tuple[dict[fx.Node, StagePass], set[fx.Node]]:
    """Where every node runs; and those that every chip computes for itself."""
    placed: dict[fx.Node, StagePass] = {}
    everywhere: set[fx.Node] = set()
    on_one_chip = {
        node: StagePass(homes[slot.key][0], Direction.UPDATE)
        for node, slot in zip(graph.placeholders, graph.inputs, strict=True)
        if len(homes[slot.key]) == 1 and slot.kind is not Kind.HYPER
    }
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = {i: on_one_chip[i] for i in node.all_input_nodes if i in on_one_chip}
        inputs |= {i: placed[i] for i in node.all_input_nodes if i in placed}
        if not inputs:
            everywhere.add(node)
            continue
        # Next to the largest thing that it reads: small results are sent, not weights.
        chip = min((-_size(i), where.stage) for i, where in inputs.items())[1]
        rounds = max(where.round + (where.stage != chip) for where in inputs.values())
        placed[node] = StagePass(chip, Direction.UPDATE, rounds)
    return placed, everywhere


def _of_state_alone(
    graph: Graph, placed: Mapping[fx.Node, StagePass], homes: Homes
) -> set[StagePass]:
    """Passes of updated state that no operator computes: a round on each of its chips."""
    busy = {each.stage for each in placed.values()}
    pairs = zip(graph.outputs, graph.returned, strict=True)
    alone = {
        chip
        for slot, node in pairs
        if node not in placed and slot.is_state
        for chip in homes[slot.key][:1]
    }
    return {StagePass(chip, Direction.UPDATE) for chip in alone - busy}


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
