"""Leaving out random nodes and edges of graphs that are too large together."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poptorch._base.errors import StateError

from . import _graphs
from ._graphs import EDGE, NODE, Levels

Masks = list[dict[Any, torch.Tensor]]


class Trimmer:
    """Decides which nodes and edges of some graphs stay.

    Of each graph one node (edge) of every type that it has, drawn at random, is protected, and
    of the first graph the first nodes where asked for; among all others the surplus is drawn.
    One node less than allowed stays where an edge of padding will need a node.

    Args:
        samples: the graphs; they are not changed.
        nodes, edges: how many may be left, by type.
        protected: how many of the first nodes of the first graph stay, by type.
    """

    def __init__(
        self,
        samples: Sequence[Any],
        nodes: Mapping[Any, int],
        edges: Mapping[Any, int],
        protected: Mapping[Any, int],
    ) -> None:
        self._samples, self._most_nodes, self._most_edges = samples, nodes, edges
        self._nodes: Masks = [
            {kind: torch.ones(count, dtype=torch.bool) for kind, count in counts.items()}
            for counts in map(_graphs.node_counts, samples)
        ]
        self._edges: Masks = [
            {kind: torch.ones(count, dtype=torch.bool) for kind, count in counts.items()}
            for counts in map(_graphs.edge_counts, samples)
        ]
        self._protected = protected

    def trim_nodes(self, edges_too: bool) -> None:
        """Leave out nodes, and the edges of these.

        Args:
            edges_too: whether surplus edges are left out afterwards.

        Raises:
            RuntimeError: a graph would be left without nodes, or without protected ones.
        """
        orders = {kind: self._order(self._nodes, kind, self._protected.get(kind, 0), "nodes")
                  for kind in self._most_nodes}  # fmt: skip
        limits = dict(self._most_nodes)
        while True:
            for kind, limit in limits.items():
                surplus = _count(self._nodes, kind) - limit
                if surplus > 0:
                    self._drop(self._nodes, kind, orders[kind], surplus)
            self._drop_dangling()
            tight = self._without_room(edges_too) & {
                kind for kind, limit in limits.items() if limit == self._most_nodes[kind]
            }
            if not tight:
                return
            for kind in tight:
                limits[kind] -= 1

    def trim_edges(self) -> None:
        """Leave out edges."""
        for kind, most in self._most_edges.items():
            surplus = _count(self._edges, kind) - most
            if surplus > 0:
                self._drop(self._edges, kind, self._order(self._edges, kind, 0, "edges"), surplus)

    def samples(self, levels: Levels) -> list[Any]:
        """Return what is left of the graphs."""
        return [
            _kept(sample, nodes, edges, levels)
            for sample, nodes, edges in zip(self._samples, self._nodes, self._edges, strict=True)
        ]

    def _without_room(self, edges_too: bool) -> set[Any]:
        """Types of nodes that are full while edges of padding need one of them."""
        needed: set[Any] = set()
        for kind, most in self._most_edges.items():
            count = _count(self._edges, kind)
            if count < most or (count > most and not edges_too):
                needed.update(_graphs.ends(kind))
        return {k for k in needed if _count(self._nodes, k) == self._most_nodes.get(k)}

    def _order(self, masks: Masks, kind: Any, first: int, what: str) -> list[tuple[int, int]]:
        """Places (graph, number) that may go, in random order."""
        places = []
        for at, mask in enumerate(masks):
            alive = mask[kind].nonzero()[:, 0] if kind in mask else torch.empty(0)
            keep = first if at == 0 else 0
            if len(alive) and not keep:
                chosen = alive[int(torch.randint(len(alive), ()))]
                alive = alive[alive != chosen]
            else:
                alive = alive[keep:]
            places += [(at, number) for number in alive.tolist()]
        order: list[int] = torch.randperm(len(places)).tolist()
        return [places[at] for at in order]

    def _drop(self, masks: Masks, kind: Any, order: list[tuple[int, int]], surplus: int) -> None:
        if surplus > len(order):
            counts = [int(mask[kind].sum()) for mask in masks if kind in mask]
            name = "" if kind is None else f" of type {kind!r}"
            raise StateError(
                "Trimming would leave empty graphs",
                got=f"graphs with {counts} nodes or edges{name}: {surplus} are too many, "
                f"{len(order)} can go",
                fix=(
                    "put fewer graphs into a micro-batch",
                    "allow more nodes and edges in FixedSizeOptions",
                ),
            )
        for _ in range(surplus):
            at, number = order.pop()
            masks[at][kind][number] = False

    def _drop_dangling(self) -> None:
        for sample, nodes, edges in zip(self._samples, self._nodes, self._edges, strict=True):
            for kind, store in _graphs.edge_stores(sample).items():
                if "edge_index" in store:
                    source, target = _graphs.ends(kind)
                    row, col = store["edge_index"]
                    edges[kind] &= nodes[source][row] & nodes[target][col]


def _count(masks: Masks, kind: Any) -> int:
    return sum(int(mask[kind].sum()) for mask in masks if kind in mask)


def _kept(
    sample: Any,
    nodes: Mapping[Any, torch.Tensor],
    edges: Mapping[Any, torch.Tensor],
    levels: Levels,
) -> Any:
    """Return a graph of the nodes and edges that stay, in their order."""
    result = copy.copy(sample)
    for key, store in _graphs.stores(sample).items():
        for name, value in list(store.items()):
            if name == "num_nodes" and key in nodes:
                _graphs.set_attribute(result, key, name, int(nodes[key].sum()))
            elif name == "edge_index":
                source, target = _graphs.ends(key)
                row, col = value[:, edges[key]]
                places = nodes[source].cumsum(0) - 1, nodes[target].cumsum(0) - 1
                joined = torch.stack([places[0][row], places[1][col]])
                _graphs.set_attribute(result, key, name, joined)
            elif (level := levels.by_key.get((key, name))) in (NODE, EDGE):
                mask = nodes[key] if level == NODE else edges[key]
                dim = sample.__cat_dim__(name, value, store)
                chosen = value.index_select(dim, mask.nonzero()[:, 0])
                _graphs.set_attribute(result, key, name, chosen)
    return result
