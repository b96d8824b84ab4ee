"""Split a micro graph in two: gradients that are ready early, and gradients that take longer.

Processes can sum the results of the first graph while the second one runs. Source: Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.3.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection

import torch
from torch import fx

from .._cost.links import Link, saved
from .._cost.seconds import core_seconds
from .._ir.block_labels import StagePass
from .._ir.graph import Graph
from .._ir.operators import acts, aten, draws, may_view, storage_root
from .._ir.slots import Kind
from .split import Cutter

LEAST = 0.05
"""The minimum saving as a share of the work, because the two parts compute more slowly, and a
concurrent sum slows down both.
"""


def early(graph: Graph, processes: int, link: Link) -> tuple[Graph, Graph] | None:
    """Split a micro graph so that a link can transfer the early gradients during the remaining
    work.

    The first part computes the early gradients and what the host gets, and the second the others
    from ``value.*``. Return None if this saves too little, or if the second part would draw or have
    other effects.
    """
    graph = graph.copy()
    nodes = graph.operators
    at = _best(graph, processes, link)
    if at is None:
        return None
    before = set(nodes[:at])
    first = _sources([node for node in graph.returned if node in before])
    second = {node for node in nodes if node not in first}
    if any(draws(node) or acts(node) for node in second):
        return None
    contiguous = _make_contiguous(first)
    passes = {node: StagePass(int(node in second)) for node in graph.operators}

    def inline(node: fx.Node, _: StagePass) -> bool:
        several = any(map(_several, node.all_input_nodes))
        return may_view(node) and not several and node not in contiguous

    cutter = Cutter(graph, passes, inline, {}, lambda slot, node: StagePass(0))
    made, left = cutter.cut([StagePass(0), StagePass(1)]).values()
    return made, left


def _best(graph: Graph, processes: int, link: Link) -> int | None:
    nodes = graph.operators
    order = {node: at for at, node in enumerate(nodes, 1)}
    sizes = {
        order[node]: slot.bytes
        for slot, node in graph.results
        if slot.kind is Kind.GRADIENT and node in order
    }
    made = sum(sizes.values())
    work = [0.0, *itertools.accumulate(map(core_seconds, nodes))]
    best, most, exchanged = None, LEAST * work[-1], 0
    for at in sorted(sizes):
        exchanged += sizes[at]
        gain = saved(exchanged, made - exchanged, work[-1] - work[at], processes, link)
        if gain > most:
            best, most = at, gain
    return best


def _sources(stack: list[fx.Node]) -> set[fx.Node]:
    """Return the operators that some nodes depend on, with all results of those that have
    several.
    """
    sources = set[fx.Node]()
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in sources:
            sources.add(node)
            stack += node.all_input_nodes
            if _several(node):
                stack += node.users
    return sources


def _make_contiguous(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Add contiguous views of values with other strides, because graphs are compiled for contiguous
    inputs.
    """
    views = set[fx.Node]()
    for node in nodes:
        value, root = node.meta.get("val"), storage_root(node)
        own = root is node or (node.target is operator.getitem and root is node.args[0])
        if not isinstance(value, torch.Tensor) or value.is_contiguous() or not own:
            continue
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        back = [order.index(axis) for axis in range(value.dim())]
        made = node.graph
        users = [user for user in node.users if user.op != "output"]
        with made.inserting_after(node):
            view = made.call_function(aten.permute.default, (node, order))
        with made.inserting_after(view):
            same = made.call_function(aten.permute.default, (view, back))
        view.meta["val"] = value.permute(order)
        same.meta["val"] = value
        for user in users:
            user.replace_input_with(node, same)
        views.add(view)
    return views


def _several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)
