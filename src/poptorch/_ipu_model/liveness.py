"""How much memory a graph needs at its fullest moment, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from .._ir.graph import Graph
from .._ir.operators import storage_root


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes of intermediate values that are alive at once.

    Values are born when their node runs and die after their last use; inputs are not counted, and
    a view costs nothing but keeps what it views alive.
    """
    order = list(graph.module.graph.nodes)
    owners = {node: storage_root(node) for node in order}
    last_use: dict[fx.Node, int] = {}
    for place, node in enumerate(order):
        for source in (node, *node.all_input_nodes):
            last_use[owners[source]] = place
    dying: dict[int, list[fx.Node]] = {}
    for node, place in last_use.items():
        dying.setdefault(place, []).append(node)
    alive = peak = 0
    for place, node in enumerate(order):
        if owners[node] is node and node.op != "placeholder":
            alive += _bytes(node.meta.get("val"))
        peak = max(peak, alive)
        alive -= sum(
            _bytes(n.meta.get("val")) for n in dying.get(place, []) if n.op != "placeholder"
        )
    return peak


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return sum(_bytes(item) for item in value)
    return 0
