"""Every node -> the stage and pass in which it runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from .._ir.blocks import label_of
from .._ir.graph import Graph
from .._ir.layout import Spot


def find_spots(graph: Graph, of_visit: Mapping[int, int], stages: int) -> dict[fx.Node, Spot]:
    """Return where every operator node runs.

    Labelled nodes run where their block is. The others follow their inputs: they run as early as
    those allow. Nodes that read nothing run where their first reader does.
    """
    ranks: dict[fx.Node, int] = {}
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    readers = _first_readers(graph, of_visit)
    floating = []
    for node in nodes:
        label = label_of(node)
        inputs = [ranks[i] for i in node.all_input_nodes if i in ranks]
        if node.target is operator.getitem:  # a result of an operator with several
            ranks[node] = inputs[0]
            continue
        if label.visit is not None and label.visit in of_visit:
            own = Spot(of_visit[label.visit], label.backward).rank(stages)
            # Gradients never flow back to a later stage; if they did, waiting would still be right.
            ranks[node] = max([own, *inputs])
            continue
        inputs += [readers[i] for i in node.all_input_nodes if i in readers]
        if not inputs:
            floating.append(node)
        elif label.backward:
            ranks[node] = _backward_rank(inputs, stages)
        else:
            ranks[node] = max(inputs)
    for node in reversed(floating):
        first = stages if label_of(node).backward else 0
        ranks[node] = max(first, min((ranks[u] for u in node.users if u in ranks), default=first))
    return {node: Spot.of_rank(ranks[node], stages) for node in nodes}


def _backward_rank(inputs: list[int], stages: int) -> int:
    """After the gradients that it reads; with none among its inputs, in the last stage it reads."""
    last = max(inputs)
    return last if last >= stages else Spot(last, backward=True).rank(stages)


def _first_readers(graph: Graph, of_visit: Mapping[int, int]) -> dict[fx.Node, int]:
    """State -> the first stage that reads it, which is where its home will be."""
    found: dict[fx.Node, int] = {}
    for node, slot in zip(graph.placeholders, graph.inputs, strict=True):
        visits = (label_of(user).visit for user in node.users)
        stages = [of_visit[visit] for visit in visits if visit is not None and visit in of_visit]
        if slot.is_state and stages:
            found[node] = min(stages)
    return found
