"""What a batch needs to stand for one of several micro-batches, and how these are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_geometric.data.data import BaseData

from . import _graphs

# What to_data_list needs; the parts of a combined batch are not at these places any more.
_PARTS = ("_slice_dict", "_inc_dict")


def as_micro_batch(batch: Any) -> Any:
    """Let a batch remember the numbers of its nodes and edges, and forget its parts.

    Tensors of several micro-batches will follow one another, and the numbers are those of one.
    Anything but a batch of graphs stays as it is.
    """
    if not isinstance(batch, BaseData):
        return batch
    nodes, edges = _graphs.node_counts(batch), _graphs.edge_counts(batch)
    for name, counts in (("num_nodes", nodes), ("num_edges", edges)):
        for kind, count in counts.items():
            _graphs.set_attribute(batch, kind, name, count)
    for name in _PARTS:
        vars(batch.stores[0]).pop(name, None)
    return batch


def join_others(batches: Sequence[Any], joined: Any) -> Any:
    """Put lists without tensors of all micro-batches, one after another, into the joined batch."""
    for key, store in _graphs.stores(joined).items():
        for name, value in list(store.items()):
            if isinstance(value, list):
                items = [item for each in batches for item in _graphs.stores(each)[key][name]]
                _graphs.set_attribute(joined, key, name, items)
    return joined
