"""Compute the bytes of the values of a graph, and the largest number that are alive at the
same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from .._ir.graph import Graph
from .._ir.operators import storage_roots


def tensors(node: object) -> list[torch.Tensor]:
    """Return the examples of an operator's results, which have no data."""
    assert isinstance(node, fx.Node)
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def value_bytes(node: fx.Node) -> int:
    return sum(tensor.nbytes for tensor in tensors(node))


def peak_bytes(graph: Graph) -> int:
    """Return the largest number of bytes of intermediate values alive at the same time, without
    inputs.
    """
    order = list(graph.module.graph.nodes)
    owners = storage_roots(order)
    sizes = {node: value_bytes(node) for node in order if node.op != "placeholder"}
    return int(max(alive_bytes(order, owners, sizes), default=0))


def alive_bytes(
    order: Sequence[fx.Node],
    owners: Mapping[fx.Node, fx.Node],
    sizes: Mapping[fx.Node, int],
    kept: Iterable[fx.Node] = (),
    in_place: Callable[[fx.Node], bool] = lambda node: False,
) -> Iterator[int]:
    """Yield the bytes that are alive while each node runs: a value lives from its computation to
    its last reader.
    """
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        last |= {owners.get(each, each): at for each in (node, *node.all_input_nodes)}
    last |= {owners.get(node, node): len(order) for node in kept}
    dying: dict[int, int] = Counter()
    for node, at in last.items():
        dying[at] += sizes.get(node, 0)
    alive = 0
    for at, node in enumerate(order):
        new = sizes.get(node, 0) if owners[node] is node else 0
        alive += new
        yield alive - (min(new, dying[at]) if in_place(node) else 0)
        alive -= dying[at]
