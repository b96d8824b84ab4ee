"""Graphs in fixed sizes: random nodes and edges left out, and graphs of padding added."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poptorch.poptorch_core import StateError

from . import _graphs
from ._graphs import EDGE, NODE, Levels
from .fixed_size_options import FixedSizeOptions

SPLITS = ("train_mask", "val_mask", "test_mask")  # never true of padding


def padding_graphs(
    model: Any,
    sizes: FixedSizeOptions,
    levels: Levels,
    missing_nodes: Mapping[Any, int],
    missing_edges: Mapping[Any, int],
    count: int,
) -> list[Any]:
    """Return ``count`` graphs like ``model``, the missing nodes and edges divided evenly."""
    nodes = {kind: shares(total, count) for kind, total in missing_nodes.items()}
    edges: dict[Any, list[int]] = {}
    for kind, total in missing_edges.items():
        source, target = _graphs.ends(kind)
        able = sum(1 for pair in zip(nodes[source], nodes[target], strict=True) if all(pair))
        if total and not able:
            name = "" if kind is None else f" of type {kind!r}"
            raise StateError(
                "There is no padding node left for padding edges to join",
                got=f"{total} edges{name} are missing, and no node",
                fix=(
                    "allow one more node: FixedSizeOptions(num_nodes=...)",
                    "OverSizeStrategy.TrimNodes makes room for one",
                ),
            )
        edges[kind] = shares(total, able) + [0] * (count - able) if able else [0] * count
    return [
        _graph(
            model,
            sizes,
            levels,
            {kind: share[at] for kind, share in nodes.items()},
            {kind: share[at] for kind, share in edges.items()},
        )
        for at in range(count)
    ]


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (at < total % parts) for at in range(parts)]


def _graph(
    model: Any,
    sizes: FixedSizeOptions,
    levels: Levels,
    nodes: Mapping[Any, int],
    edges: Mapping[Any, int],
) -> Any:
    graph = copy.copy(model)
    defaults = sizes.pad_graph_defaults or {}
    for key, store in _graphs.stores(model).items():
        for name, value in list(store.items()):
            level = levels.by_key.get((key, name))
            if name == "num_nodes" and key in nodes:
                padding: Any = nodes[key]
            elif name == "edge_index":
                padding = value.new_zeros(2, edges[key])  # from the first node to the first
            elif not isinstance(value, torch.Tensor):
                padding = defaults.get(name, copy.deepcopy(value))
            else:
                fill, length = sizes.graph_pad_value, None
                if level == NODE:
                    fill, length = sizes.node_pad_value, nodes[key]
                elif level == EDGE:
                    fill, length = sizes.edge_pad_value, edges[key]
                fill = False if name in SPLITS else defaults.get(name, fill)
                dim = model.__cat_dim__(name, value, store)
                padding = _filled(value, dim, length, fill)
            _graphs.set_attribute(graph, key, name, padding)
    return graph


def _filled(like: torch.Tensor, dim: Any, length: int | None, fill: Any) -> torch.Tensor:
    shape = list(like.shape)
    if length is not None:
        shape[dim] = length
    return torch.as_tensor(fill).to(like.dtype).expand(shape).clone()


def missing(what: str, allowed: Mapping[Any, int], samples: Sequence[Any]) -> dict[Any, int]:
    counts = _graphs.node_counts if what == "nodes" else _graphs.edge_counts
    present = dict.fromkeys(allowed, 0)
    for sample in samples:
        for kind, count in counts(sample).items():
            present[kind] += count
    for kind, count in present.items():
        if count > allowed[kind]:
            name = "" if kind is None else f" of type {kind!r}"
            raise StateError(
                "The fixed sizes don't allocate enough space for the number of "
                f"{what}{name} in a micro-batch",
                got=f"{count} {what}{name}, where {allowed[kind]} fit",
                fix=(
                    f"allow more: FixedSizeOptions(num_{what}=...)",
                    f"leave some out: trim_{what}=True, or a loader's "
                    f"OverSizeStrategy.Trim{what.capitalize()}",
                ),
            )
    return {kind: allowed[kind] - count for kind, count in present.items()}


Masks = list[dict[Any, torch.Tensor]]


class Trimmer:
    """Decides which nodes and edges of some graphs stay.

    Of each graph one node (edge) of every type, drawn at random, is protected, and of the first
    graph the first nodes where asked for; among all others the surplus is drawn. One node less
    than allowed stays where an edge of padding will need a node.
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

    def trimmed(self, nodes: bool, edges: bool, levels: Levels) -> list[Any]:
        if nodes:
            self._trim_nodes(edges_too=edges)
        if edges:
            for kind, most in self._most_edges.items():
                surplus = _count(self._edges, kind) - most
                if surplus > 0:
                    order = self._order(self._edges, kind, 0)
                    self._drop(self._edges, kind, order, surplus)
        left = zip(self._samples, self._nodes, self._edges, strict=True)
        return [_kept(*each, levels) for each in left]

    def _trim_nodes(self, edges_too: bool) -> None:
        orders = {
            kind: self._order(self._nodes, kind, self._protected.get(kind, 0))
            for kind in self._most_nodes
        }
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

    def _without_room(self, edges_too: bool) -> set[Any]:
        """Types of nodes that are full while edges of padding need one of them."""
        needed: set[Any] = set()
        for kind, most in self._most_edges.items():
            count = _count(self._edges, kind)
            if count < most or (count > most and not edges_too):
                needed.update(_graphs.ends(kind))
        return {k for k in needed if _count(self._nodes, k) == self._most_nodes.get(k)}

    def _order(self, masks: Masks, kind: Any, first: int) -> list[tuple[int, int]]:
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
