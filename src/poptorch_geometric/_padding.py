"""Graphs that only fill a batch up. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poptorch._base.errors import StateError

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
    """Return so many graphs of padding, which have the missing nodes and edges together.

    Args:
        model: the first sample; padding has its attributes.
        sizes: gives the values.
        levels: what is of nodes, of edges, of graphs.
        missing_nodes, missing_edges: by type; divided evenly, the first graphs get the remainder.

    Raises:
        RuntimeError: edges of padding have no node of padding to join.
    """
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
    """Divide a number evenly; what is left over goes to the first."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _graph(
    model: Any,
    sizes: FixedSizeOptions,
    levels: Levels,
    nodes: Mapping[Any, int],
    edges: Mapping[Any, int],
) -> Any:
    """One graph of padding, with every attribute that a real one has."""
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
    """Return how many nodes or edges of each type are needed to fill a batch up.

    Raises:
        RuntimeError: there are too many.
        AssertionError: a type that the sizes do not name.
    """
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
