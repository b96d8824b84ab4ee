"""Fit graphs to fixed sizes: leave out random nodes and edges, and add padding graphs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poptorch.poptorch_core import AssertionFailure, StateError

from . import _graphs
from ._graphs import EDGE, GRAPH, NODE
from .fixed_size_options import FixedSizeOptions

Levels = Mapping[tuple[Any, str], str]
Counts = Mapping[Any, int]  # by type
Masks = dict[Any, torch.Tensor]  # for one graph, by type
SPLITS = ("train_mask", "val_mask", "test_mask")  # never True for padding


def padding_graphs(
    model: Any, sizes: FixedSizeOptions, levels: Levels, missing: Mapping[str, Counts], count: int
) -> list[Any]:
    """Return ``count`` graphs like ``model`` that contain the missing nodes and edges,
    divided evenly.
    """
    nodes = {kind: shares(total, count) for kind, total in missing["nodes"].items()}
    edges: dict[Any, list[int]] = {}
    for kind, total in missing["edges"].items():
        source, target = _graphs.ends(kind)
        able = sum(1 for pair in zip(nodes[source], nodes[target], strict=True) if all(pair))
        if total and not able:
            raise StateError(
                "There is no padding node left that padding edges could connect",
                got=(
                    f"{total} padding edges{_graphs.of_type(kind)} are needed, but there is "
                    "no padding node"
                ),
                fix=(
                    "allow one more node: FixedSizeOptions(num_nodes=...)",
                    "or use OverSizeStrategy.TrimNodes, which makes room for one",
                ),
            )
        edges[kind] = shares(total, able) + [0] * (count - able) if able else [0] * count
    graphs = []
    for at in range(count):
        lengths = {
            NODE: {kind: share[at] for kind, share in nodes.items()},
            EDGE: {kind: share[at] for kind, share in edges.items()},
        }
        graphs.append(_graph(model, sizes, levels, lengths))
    return graphs


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (at < total % parts) for at in range(parts)]


def _graph(
    model: Any, sizes: FixedSizeOptions, levels: Levels, lengths: Mapping[str, Counts]
) -> Any:
    graph = copy.copy(model)
    defaults = sizes.pad_graph_defaults or {}
    fills = {NODE: sizes.node_pad_value, EDGE: sizes.edge_pad_value, GRAPH: sizes.graph_pad_value}
    for key, store in _graphs.stores(model).items():
        for name, value in list(store.items()):
            if name == "num_nodes" and key in lengths[NODE]:
                padding: Any = lengths[NODE][key]
            elif name == "edge_index":
                padding = value.new_zeros(2, lengths[EDGE][key])  # from the first node to itself
            elif not isinstance(value, torch.Tensor):
                padding = defaults.get(name, copy.deepcopy(value))
            else:
                level = levels.get((key, name), GRAPH)
                shape = list(value.shape)
                if level != GRAPH:
                    shape[model.__cat_dim__(name, value, store)] = lengths[level][key]
                fill = False if name in SPLITS else defaults.get(name, fills[level])
                padding = torch.as_tensor(fill).to(value.dtype).expand(shape).clone()
            _graphs.set_attribute(graph, key, name, padding)
    return graph


def missing(what: str, allowed: Counts, samples: Sequence[Any]) -> dict[Any, int]:
    counts = _graphs.node_counts if what == "nodes" else _graphs.edge_counts
    present: Counter[Any] = Counter()
    for sample in samples:
        present.update(counts(sample))
    for kind, count in present.items():
        if kind not in allowed:
            raise AssertionFailure(
                f"{what[:-1].capitalize()} type {kind!r} exists in the data but not in the fixed "
                "size options",
                got=f"FixedSizeOptions has sizes for {list(allowed)}",
                fix="add its size to FixedSizeOptions, or give one number for all types",
            )
        if count > allowed[kind]:
            name = _graphs.of_type(kind)
            raise StateError(
                "The fixed sizes don't allocate enough space for the number of "
                f"{what}{name} in a micro-batch",
                got=f"{count} {what}{name}; at most {allowed[kind]} fit",
                fix=(
                    f"allow more: FixedSizeOptions(num_{what}=...)",
                    (
                        f"or leave some {what} out: trim_{what}=True, or "
                        f"OverSizeStrategy.Trim{what.capitalize()} of a loader"
                    ),
                ),
            )
    return {kind: most - present[kind] for kind, most in allowed.items()}


class Trimmer:
    """Decides which nodes and edges of some graphs stay.

    One random node (edge) of every type is protected in each graph, and also the first nodes of the
    first graph if requested. The others to leave out are drawn at random. If a padding edge
    needs a node, one node less than allowed stays.
    """

    def __init__(
        self, samples: Sequence[Any], nodes: Counts, edges: Counts, protected: Counts
    ) -> None:
        self._samples, self._most_nodes, self._most_edges = samples, nodes, edges
        self._nodes = [_whole(_graphs.node_counts(sample)) for sample in samples]
        self._edges = [_whole(_graphs.edge_counts(sample)) for sample in samples]
        self._protected = protected

    def trimmed(self, nodes: bool, edges: bool, levels: Levels) -> list[Any]:
        if nodes:
            self._trim_nodes(self._most_nodes)
            while full := self._without_room(edges):
                self._trim_nodes({kind: self._most_nodes[kind] - 1 for kind in full})
        if edges:
            for kind, most in self._most_edges.items():
                _shrink(self._edges, kind, most)
        left = zip(self._samples, self._nodes, self._edges, strict=True)
        return [_kept(*each, levels) for each in left]

    def _trim_nodes(self, limits: Counts) -> None:
        for kind, limit in limits.items():
            _shrink(self._nodes, kind, limit, self._protected.get(kind, 0))
        self._drop_dangling()

    def _without_room(self, edges_too: bool) -> set[Any]:
        """Return the types of nodes that leave no node for the padding edges that need one."""
        needed: set[Any] = set()
        for kind, most in self._most_edges.items():
            count = _count(self._edges, kind)
            if count < most or (count > most and not edges_too):
                needed.update(_graphs.ends(kind))
        return {k for k in needed if _count(self._nodes, k) == self._most_nodes.get(k)}

    def _drop_dangling(self) -> None:
        for sample, nodes, edges in zip(self._samples, self._nodes, self._edges, strict=True):
            for kind, store in _graphs.edge_stores(sample).items():
                if "edge_index" in store:
                    source, target = _graphs.ends(kind)
                    row, col = store["edge_index"]
                    edges[kind] &= nodes[source][row] & nodes[target][col]


def _whole(counts: Counts) -> Masks:
    return {kind: torch.ones(count, dtype=torch.bool) for kind, count in counts.items()}


def _shrink(masks: Sequence[Masks], kind: Any, limit: int, first: int = 0) -> None:
    """Leave out the surplus. The first ones of the first graph stay, and at least one of each other
    graph.
    """
    surplus = _count(masks, kind) - limit
    if surplus <= 0:
        return
    places = []
    for at, mask in enumerate(masks):
        if kind in mask:
            alive = mask[kind].nonzero()[:, 0]
            keeps_first = first and at == 0
            able = alive[first:] if keeps_first else alive[torch.randperm(len(alive))[1:]]
            places += [(at, number) for number in able.tolist()]
    if surplus > len(places):
        counts = [int(mask[kind].sum()) for mask in masks if kind in mask]
        raise StateError(
            "Trimming would leave empty graphs",
            got=(
                f"graphs with {counts} nodes or edges{_graphs.of_type(kind)}: {surplus} are "
                f"too many, and only {len(places)} can be removed"
            ),
            fix=(
                "put fewer graphs into a micro-batch: a smaller batch_size of the loader",
                "or allow more nodes and edges: FixedSizeOptions(num_nodes=..., num_edges=...)",
            ),
        )
    for chosen in torch.randperm(len(places))[:surplus].tolist():
        at, number = places[chosen]
        masks[at][kind][number] = False


def _count(masks: Sequence[Masks], kind: Any) -> int:
    return sum(int(mask[kind].sum()) for mask in masks if kind in mask)


def _kept(sample: Any, nodes: Masks, edges: Masks, levels: Levels) -> Any:
    result = copy.copy(sample)
    for key, store in _graphs.stores(sample).items():
        for name, value in list(store.items()):
            level = levels.get((key, name))
            if name == "num_nodes" and key in nodes:
                kept: Any = int(nodes[key].sum())
            elif name == "edge_index":
                source, target = _graphs.ends(key)
                row, col = value[:, edges[key]]
                places = nodes[source].cumsum(0) - 1, nodes[target].cumsum(0) - 1
                kept = torch.stack([places[0][row], places[1][col]])
            elif level in (NODE, EDGE):
                mask = nodes[key] if level == NODE else edges[key]
                dim = sample.__cat_dim__(name, value, store)
                kept = value.index_select(dim, mask.nonzero()[:, 0])
            else:
                continue
            _graphs.set_attribute(result, key, name, kept)
    return result
