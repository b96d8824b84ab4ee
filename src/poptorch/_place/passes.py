"""Every node -> the pass of the stage in which it runs, written into its label."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from .._ir.blocks import Direction, StagePass, label_of, pass_of, relabel
from .._ir.graph import Graph


def with_passes(graph: Graph, of_visit: Mapping[int, int], stages: int) -> Graph:
    """Return a graph whose operators say where they run.

    Args:
        graph: labelled with visits.
        of_visit: index of a visit to index of its stage.
        stages: how many there are.
    """
    graph = graph.copy()
    for node in graph.module.graph.nodes:
        label = label_of(node)
        stage = None if label.visit is None else of_visit.get(label.visit)
        if node.op == "call_function" and stage is not None:
            own = StagePass(stage, Direction.BACKWARD if label.backward else Direction.FORWARD)
            relabel(node, replace(label, stage_pass=own))
    _complete(graph, stages)
    return graph


def completed(graph: Graph, stages: int) -> Graph:
    """Return a graph in which operators whose place is open follow their inputs.

    They run as early as those allow; what reads nothing runs where its first reader does.
    """
    graph = graph.copy()
    _complete(graph, stages)
    return graph


def _complete(graph: Graph, stages: int) -> None:
    last_backward = StagePass(stages - 1, Direction.BACKWARD)
    readers = _first_readers(graph)
    floating = []
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        own = pass_of(node)
        inputs = [where for i in node.all_input_nodes if (where := pass_of(i)) is not None]
        if node.target is operator.getitem:  # a result of an operator with several
            own = inputs[0]
        elif own is not None:
            # Gradients never flow back to a later stage; if they did, waiting would still be right.
            own = max([own, *inputs])
        else:
            inputs += [readers[i] for i in node.all_input_nodes if i in readers]
            if not inputs:
                floating.append(node)
                continue
            own = max(inputs)
            if label_of(node).backward:  # with no gradient among its inputs: in their last stage
                own = max(own, StagePass(own.stage, Direction.BACKWARD))
        _write(node, own)
    for node in reversed(floating):
        first = last_backward if label_of(node).backward else StagePass(0)
        users = [where for user in node.users if (where := pass_of(user)) is not None]
        _write(node, max(first, min(users, default=first)))


def _write(node: fx.Node, stage_pass: StagePass) -> None:
    relabel(node, replace(label_of(node), stage_pass=stage_pass))


def _first_readers(graph: Graph) -> dict[fx.Node, StagePass]:
    """State -> the forward pass of the first stage that reads it: where its home will be."""
    readers = {}
    for node, slot in zip(graph.placeholders, graph.inputs, strict=True):
        stages = [where.stage for user in node.users if (where := pass_of(user)) is not None]
        if slot.is_state and stages:
            readers[node] = StagePass(min(stages))
    return readers
