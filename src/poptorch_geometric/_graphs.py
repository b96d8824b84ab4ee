"""Handle graphs with and without types in the same way: stores by type, counts, levels of
attributes.

A homogeneous graph has one type of nodes and one of edges, both called None, and one store.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import HeteroData

from poptorch.poptorch_core import AssertionFailure, InvalidKey

NODE, EDGE, GRAPH = "node", "edge", "graph"


def is_hetero(sample: Any) -> bool:
    return isinstance(sample, HeteroData)


def node_stores(sample: Any) -> dict[Any, Any]:
    return dict(sample.node_items()) if is_hetero(sample) else {None: sample.node_stores[0]}


def edge_stores(sample: Any) -> dict[Any, Any]:
    return dict(sample.edge_items()) if is_hetero(sample) else {None: sample.edge_stores[0]}


def ends(kind: Any) -> tuple[Any, Any]:
    return (kind[0], kind[-1]) if isinstance(kind, tuple) else (None, None)


def node_counts(sample: Any) -> dict[Any, int]:
    with warnings.catch_warnings():
        # torch_geometric guesses if no attribute has a row per node
        warnings.simplefilter("ignore", UserWarning)
        return {kind: store.num_nodes or 0 for kind, store in node_stores(sample).items()}


def edge_counts(sample: Any) -> dict[Any, int]:
    return {kind: store.num_edges for kind, store in edge_stores(sample).items()}


def stores(sample: Any) -> dict[Any, Any]:
    """Return every store once, by its key; None is the store of the graph."""
    if not is_hetero(sample):
        return {None: sample.node_stores[0]}
    return {None: sample.stores[0], **node_stores(sample), **edge_stores(sample)}


def set_attribute(sample: Any, key: Any, name: str, value: Any) -> None:
    (sample if key is None else sample[key])[name] = value


def total(sizes: int | Mapping[Any, int]) -> int:
    return sum(sizes.values()) if isinstance(sizes, Mapping) else sizes


def ranges(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers in several ranges one after another, and the index of the range
    for each.
    """
    owner = torch.repeat_interleave(lengths)
    first = (starts - (lengths.cumsum(0) - lengths))[owner]
    return first + torch.arange(len(owner)), owner


def of_type(kind: Any) -> str:
    return "" if kind is None else f" of type {kind!r}"


def levels(samples: Sequence[Any], excluded: Sequence[str]) -> dict[tuple[Any, str], str]:
    """Decide, from all samples, whether a tensor, by store and name, belongs to nodes, edges or
    graphs.
    """
    found = {}
    nodes, edges = list(map(node_counts, samples)), list(map(edge_counts, samples))
    each = list(map(stores, samples))
    for key, store in each[0].items():
        for name, value in store.items():
            if name in excluded:
                continue
            _check_present(each, key, name)
            if isinstance(value, torch.Tensor):
                lengths = [_length(*pair, key, name) for pair in zip(samples, each, strict=True)]
                counts = [n.get(key) for n in nodes], [e.get(key) for e in edges]
                is_label = name == "y" and not is_hetero(samples[0])
                found[key, name] = (_label_level if is_label else _level)(name, lengths, *counts)
    return found


def _length(sample: Any, stores: Mapping[Any, Any], key: Any, name: str) -> int | None:
    value = stores[key][name]
    dim = sample.__cat_dim__(name, value, stores[key])
    return value.shape[dim] if isinstance(dim, int) and value.dim() else None


def _level(name: str, lengths: list[Any], nodes: list[Any], edges: list[Any]) -> str:
    if None in lengths:
        return GRAPH
    if lengths == edges and (lengths != nodes or "edge" in name):
        return EDGE
    return NODE if lengths == nodes else GRAPH


def _label_level(name: str, lengths: list[Any], nodes: list[Any], edges: list[Any]) -> str:
    if all(length in (None, 1) for length in lengths):
        return GRAPH
    if lengths == nodes:
        return NODE
    raise AssertionFailure(
        "Incorrect input data: the labels y have neither one row per node nor one row per graph",
        got=f"the labels of the graphs have {lengths} rows; the graphs have {nodes} nodes",
        fix="use one row of y for each node, or one row for each graph",
    )


def _check_present(each: Sequence[Mapping[Any, Any]], key: Any, name: str) -> None:
    for at, sample in enumerate(each):
        if key not in sample or name not in sample[key]:
            owner = "" if key is None else f" of {key!r}"
            raise InvalidKey(
                "The graphs of a batch must have the same attributes",
                got=f"graph {at} has no {name!r}{owner}, but graph 0 has one",
                fix=(
                    "add the attribute to every graph of the data set",
                    f"or exclude it everywhere: exclude_keys=({name!r},)",
                ),
            )
