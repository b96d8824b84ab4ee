"""Combine graphs and pad them to fixed sizes. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData

from poptorch.dataloader import join
from poptorch.poptorch_core import AssertionFailure, Error, InvalidType, StateError

from . import _fitting, _graphs
from .fixed_size_options import FixedSizeOptions, suited

_log = logging.getLogger("poptorch::python")


def make_exclude_keys(include_keys: Sequence[str], data: Any) -> tuple[str, ...]:
    """Return the attributes of a graph that are not in a list."""
    return tuple(key for key in data.keys() if key not in include_keys)  # noqa: SIM118 (no mapping)


class FixedSizeCollater:
    """Make batches of one size: the samples, then padding graphs.

    Args:
        fixed_size_options: the sizes; ``to_hetero`` converts them if samples have types.
        add_masks_to_batch: add ``graphs_mask``, ``nodes_mask`` and ``edges_mask``: True for the
            samples, False for the padding that follows them.
        trim_nodes, trim_edges: leave out random nodes or edges if there are too many.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
    """

    def __init__(
        self,
        fixed_size_options: FixedSizeOptions,
        add_masks_to_batch: bool = False,
        trim_nodes: bool = False,
        trim_edges: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        self.fixed_size_options = fixed_size_options
        self.add_masks_to_batch = add_masks_to_batch
        self.trim_nodes, self.trim_edges = trim_nodes, trim_edges
        self.follow_batch = list(follow_batch or [])
        self.exclude_keys = list(exclude_keys or [])
        self._unchecked = bool(fixed_size_options.pad_graph_defaults)

    def __call__(self, samples: list[Any]) -> Batch:
        """Return a batch of G graphs, n nodes and e edges, of every type.

        Args:
            samples: a list of graphs of one class; nothing in it is changed.

        Raises:
            TypeError: the samples are not in a list.
            RuntimeError: there are too many graphs, nodes or edges, or no graph or node is left for
                padding.
            AssertionError: graphs have different classes, labels ``y`` belong neither to nodes nor
                to graphs, or the sizes lack a type.
            KeyError: a graph lacks an attribute.
            poptorch.Error: there are no graphs, or an edge has a node that does not exist.
        """
        return self.collate(samples, {})

    def collate(self, samples: list[Any], protected: Mapping[Any, int]) -> Batch:
        """Return a batch that keeps the first nodes of the first sample.

        Args:
            protected: how many nodes to keep, by type.
        """
        _check(samples)
        sizes = suited(self.fixed_size_options, samples[0])
        if len(samples) > sizes.num_graphs:
            raise StateError(
                "The fixed sizes don't allocate enough space for the number of graphs",
                got=(
                    f"{len(samples)} samples + 1 padding graph; at most {sizes.num_graphs} "
                    "graphs fit"
                ),
                fix="allow more: FixedSizeOptions(num_graphs=...), which counts the padding graph",
            )
        most = {"nodes": _by_type(sizes.num_nodes), "edges": _by_type(sizes.num_edges)}
        levels = _graphs.levels(samples, self.exclude_keys)
        graphs = list(samples)
        if self.trim_nodes or self.trim_edges:
            trimmer = _fitting.Trimmer(samples, most["nodes"], most["edges"], protected)
            graphs = trimmer.trimmed(self.trim_nodes, self.trim_edges, levels)
        missing = {what: _fitting.missing(what, all_of, graphs) for what, all_of in most.items()}
        spare = sizes.num_graphs - len(graphs)
        if not spare and any(any(counts.values()) for counts in missing.values()):
            raise StateError(
                "The collater cannot create additional graphs to pad nodes and edges",
                got=(
                    f"{len(graphs)} samples use all {sizes.num_graphs} graphs, and "
                    f"{missing['nodes']} padding nodes and {missing['edges']} padding edges are "
                    "missing"
                ),
                fix=("allow one more graph for padding: FixedSizeOptions(num_graphs=samples + 1)"),
            )
        if self._unchecked:
            self._report_unknown(graphs[0])
        padding = _fitting.padding_graphs(graphs[0], sizes, levels, missing, spare)
        batch = Batch.from_data_list(
            [*graphs, *padding], follow_batch=self.follow_batch, exclude_keys=self.exclude_keys
        )
        if self.add_masks_to_batch:
            batch.graphs_mask = torch.arange(sizes.num_graphs) < len(graphs)
            for what, all_of in most.items():
                for kind, size in all_of.items():
                    mask = torch.arange(size) < size - missing[what][kind]
                    _graphs.set_attribute(batch, kind, f"{what}_mask", mask)
        return batch

    def _report_unknown(self, model: Any) -> None:
        self._unchecked = False
        known = [*model.keys(), *self.exclude_keys]
        defaults = self.fixed_size_options.pad_graph_defaults or {}
        unknown = [key for key in defaults if key not in known]
        if unknown:
            _log.warning(
                "pad_graph_defaults names attributes that the graphs do not have: %s; they have %s",
                ", ".join(map(str, unknown)),
                ", ".join(map(str, known)),
            )


def _as_micro_batch(batch: Any) -> Any:
    """Store the numbers of nodes and edges in a batch of graphs. Once batches are joined, their
    tensors no longer show these numbers.
    """
    if not isinstance(batch, BaseData):
        return batch
    nodes, edges = _graphs.node_counts(batch), _graphs.edge_counts(batch)
    for name, counts in (("num_nodes", nodes), ("num_edges", edges)):
        for kind, count in counts.items():
            _graphs.set_attribute(batch, kind, name, count)
    # positions of parts, which change when batches are joined
    for name in ("_slice_dict", "_inc_dict"):
        vars(batch.stores[0]).pop(name, None)
    return batch


class CombinedBatchingCollater:
    """Collate each micro-batch of a combined batch, and join them along dimension 0.

    Args:
        collater: makes a batch of the samples of one micro-batch.
        mini_batch_size: number of samples in a micro-batch; by default all.
        fills: allow fewer samples in the last micro-batch; it gets more padding.
    """

    def __init__(
        self,
        collater: Callable[[list[Any]], Any],
        mini_batch_size: int | None = None,
        fills: bool = False,
    ) -> None:
        self.collater, self.mini_batch_size, self.fills = collater, mini_batch_size, fills

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the combined batch.

        Raises:
            AssertionError: the samples do not divide into micro-batches.
        """
        size = self.mini_batch_size or len(samples)
        if len(samples) % size and not self.fills:
            raise AssertionFailure(
                "Invalid batch size: the samples do not divide into micro-batches",
                got=f"{len(samples)} samples; a micro-batch has {size}",
                fix="leave the incomplete batch out: drop_last=True",
            )
        parts = [list(samples[at : at + size]) for at in range(0, len(samples), size)]
        return join([_as_micro_batch(self.collater(part)) for part in parts])


def _by_type(sizes: Any) -> dict[Any, int]:
    return dict(sizes) if isinstance(sizes, Mapping) else {None: sizes}


def _check(samples: Any) -> None:
    if not isinstance(samples, list):
        raise InvalidType(f"Expected list, got {type(samples).__name__}",
                          fix="pass a list of graphs")  # fmt: skip
    if not samples:
        raise Error(
            "The list of graphs of a batch is empty",
            got="an empty list",
            fix="pass at least one graph, which determines the types of the padding",
        )
    kinds = {type(sample) for sample in samples}
    if len(kinds) > 1:
        raise AssertionFailure(
            "All graphs of a batch must have the same class",
            got=", ".join(sorted(kind.__name__ for kind in kinds)),
            fix="convert all samples to the same class, for example Data or HeteroData",
        )
    for at, sample in enumerate(samples):
        counts = _graphs.node_counts(sample)
        for kind, store in _graphs.edge_stores(sample).items():
            if "edge_index" in store and store["edge_index"].numel():
                _check_edges(at, kind, store["edge_index"], counts)


def _check_edges(at: int, kind: Any, edge_index: torch.Tensor, counts: Mapping[Any, int]) -> None:
    """Refuse edges with nodes that do not exist. In a batch they would connect nodes of
    other graphs.
    """
    for row, end in zip(edge_index, _graphs.ends(kind), strict=True):
        least, most = (int(bound) for bound in torch.aminmax(row))
        if least < 0 or most >= counts.get(end, 0):
            raise Error(
                "An edge refers to a node that the graph does not have",
                got=f"graph {at}: edge_index{_graphs.of_type(kind)} has numbers from {least} to "
                f"{most}, but the graph has {counts.get(end, 0)} nodes",
                fix=(
                    "number the nodes of each graph starting with 0",
                    "if the graph has nodes without attributes, set num_nodes",
                ),
            )
