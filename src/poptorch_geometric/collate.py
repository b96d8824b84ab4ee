"""Graphs put together and padded to fixed sizes. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch_geometric.data import Batch, Data

from poptorch._base import log
from poptorch._base.errors import Error
from poptorch._data.combining import join

from .fixed_size_options import FixedSizeOptions


def make_exclude_keys(include_keys: Sequence[str], data: Any) -> list[str]:
    """Return the attributes of a graph that are not among these."""
    return [key for key in data.keys() if key not in include_keys]  # noqa: SIM118 (no mapping)


class FixedSizeCollater:
    """Makes batches of one size: the samples, then graphs of padding.

    Args:
        fixed_size_options: the sizes.
        add_masks_to_batch: add ``graphs_mask``, ``nodes_mask`` and ``edges_mask``: True where
            something is real, which comes first.
        trim_nodes, trim_edges: leave out random nodes or edges where there are too many.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.

    Raises:
        poptorch.Error: sizes by type; graphs of several types are not supported.
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
        if fixed_size_options.is_hetero():
            raise Error(
                "Graphs with several types of nodes are not supported",
                fix="torch_geometric's to_homogeneous() makes one type of them",
            )
        self._sizes = fixed_size_options
        self._masks = add_masks_to_batch
        self._trim_nodes, self._trim_edges = trim_nodes, trim_edges
        self._follow = list(follow_batch or [])
        self._exclude = list(exclude_keys or [])
        self._unchecked = bool(fixed_size_options.pad_graph_defaults)

    def __call__(self, samples: Sequence[Data]) -> Batch:
        """Return a batch.

        Raises:
            RuntimeError: too many graphs, nodes or edges; or no graph is left for padding.
            AssertionError: labels ``y`` that are neither of nodes nor of graphs.
        """
        graphs, sizes = list(samples), self._sizes
        if len(graphs) > sizes.num_graphs:
            raise RuntimeError(f"{len(graphs)} graphs do not fit into {sizes.num_graphs}")
        spare = sizes.num_graphs - len(graphs)
        if self._trim_nodes:
            graphs = _with_fewer_nodes(graphs, sizes.total_num_nodes - min(spare, 1))
        if self._trim_edges:
            graphs = _with_fewer_edges(graphs, sizes.total_num_edges)
        nodes = _missing("nodes", sizes.total_num_nodes, sum(g.num_nodes for g in graphs))
        edges = _missing("edges", sizes.total_num_edges, sum(g.num_edges for g in graphs))
        padding = self._padding(graphs, spare, nodes, edges)
        batch = Batch.from_data_list(
            [*graphs, *padding], follow_batch=self._follow, exclude_keys=self._exclude
        )
        if self._masks:
            batch.graphs_mask = _first(len(graphs), sizes.num_graphs)
            batch.nodes_mask = _first(sizes.total_num_nodes - nodes, sizes.total_num_nodes)
            batch.edges_mask = _first(sizes.total_num_edges - edges, sizes.total_num_edges)
        return batch

    def _padding(self, graphs: list[Data], spare: int, nodes: int, edges: int) -> list[Data]:
        if not spare:
            if nodes or edges:
                raise RuntimeError(f"{nodes} nodes and {edges} edges of padding need a graph")
            return []
        if edges and not nodes:
            raise RuntimeError(f"{edges} edges of padding need a node of padding")
        of_nodes = _shares(nodes, spare)
        with_nodes = sum(1 for share in of_nodes if share)
        of_edges = _shares(edges, with_nodes) if with_nodes else []
        of_edges += [0] * (spare - len(of_edges))
        model = max(graphs, key=lambda graph: graph.num_nodes)
        if self._unchecked:
            self._say_unknown(model)
        y_of_nodes = _labels_are_of_nodes(graphs)
        return [
            self._graph(model, y_of_nodes, *counts)
            for counts in zip(of_nodes, of_edges, strict=True)
        ]

    def _say_unknown(self, model: Data) -> None:
        """Warn once of defaults for attributes that no graph has."""
        self._unchecked = False
        known = [*model.to_dict(), *self._exclude]
        unknown = [key for key in self._sizes.pad_graph_defaults or {} if key not in known]
        if unknown:
            log.python.warning(
                "pad_graph_defaults names attributes that the graphs do not have: %s; they have %s",
                ", ".join(map(str, unknown)),
                ", ".join(known),
            )

    def _graph(self, model: Data, y_of_nodes: bool, nodes: int, edges: int) -> Data:
        """One graph of padding, with every attribute that a real one has."""
        graph, sizes = Data(), self._sizes
        defaults: dict[str, Any] = sizes.pad_graph_defaults or {}
        for key, value in model.to_dict().items():
            if key in self._exclude:
                continue
            if key == "edge_index":
                graph[key] = value.new_zeros(2, edges)  # from the first node to itself
            elif key == "num_nodes":
                graph.num_nodes = nodes
            elif not torch.is_tensor(value):
                graph[key] = defaults.get(key, type(value)(sizes.graph_pad_value))
            elif y_of_nodes if key == "y" else model.is_node_attr(key):
                graph[key] = _full(value, nodes, defaults.get(key, sizes.node_pad_value))
            elif key != "y" and model.is_edge_attr(key):
                graph[key] = _full(value, edges, defaults.get(key, sizes.edge_pad_value))
            else:
                fill = defaults.get(key, sizes.graph_pad_value)
                graph[key] = torch.zeros_like(value) + torch.as_tensor(fill).to(value.dtype)
        return graph


class CombinedBatchingCollater:
    """Collates each micro-batch of a combined batch, and joins them along dimension 0.

    Args:
        mini_batch_size: samples of one micro-batch.
        collater: makes a batch of them.
    """

    def __init__(self, mini_batch_size: int, collater: Callable[[Sequence[Any]], Any]) -> None:
        self._size, self._collater = mini_batch_size, collater

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the combined batch.

        Raises:
            AssertionError: samples that do not divide into micro-batches.
        """
        assert len(samples) % self._size == 0, (
            f"Invalid batch size: {len(samples)} samples are no multiple of {self._size}"
        )
        parts = [samples[at : at + self._size] for at in range(0, len(samples), self._size)]
        return join([self._collater(part) for part in parts])


def _missing(what: str, wanted: int, present: int) -> int:
    if present > wanted:
        raise RuntimeError(f"{present} {what} do not fit into {wanted}")
    return wanted - present


def _shares(total: int, parts: int) -> list[int]:
    """Divide a number evenly; what is left over goes to the first."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _first(count: int, length: int) -> torch.Tensor:
    return torch.arange(length) < count


def _full(like: torch.Tensor, rows: int, value: Any) -> torch.Tensor:
    shape = (rows, *like.shape[1:])
    return torch.as_tensor(value).to(like.dtype).expand(shape).clone()


def _labels_are_of_nodes(graphs: Sequence[Data]) -> bool:
    labels = [graph.y for graph in graphs if torch.is_tensor(graph.get("y", None))]
    if not labels:
        return False
    rows = [label.shape[0] if label.dim() else 1 for label in labels]
    of_nodes = rows == [graph.num_nodes for graph in graphs]
    of_graphs = set(rows) == {1}
    assert of_nodes or of_graphs, (
        f"Labels y must have as many rows as nodes, or one for each graph, not {rows}"
    )
    return not of_graphs


def _with_fewer_nodes(graphs: list[Data], most: int) -> list[Data]:
    counts = [graph.num_nodes for graph in graphs]
    excess = sum(counts) - most
    if excess <= 0:
        return graphs
    removed = _drawn([count - 1 for count in counts], excess, "nodes")
    kept = (
        torch.randperm(count)[: count - less].sort().values
        for count, less in zip(counts, removed, strict=True)
    )
    return [graph.subgraph(nodes) for graph, nodes in zip(graphs, kept, strict=True)]


def _with_fewer_edges(graphs: list[Data], most: int) -> list[Data]:
    counts = [graph.num_edges for graph in graphs]
    excess = sum(counts) - most
    if excess <= 0:
        return graphs
    kept = []
    for graph, less in zip(graphs, _drawn(counts, excess, "edges"), strict=True):
        edges = torch.randperm(graph.num_edges)[: graph.num_edges - less].sort().values
        kept.append(graph.edge_subgraph(edges))
    return kept


def _drawn(available: Sequence[int], count: int, what: str) -> list[int]:
    """Draw things to remove from several heaps; return how many from each."""
    if count > sum(available):
        raise RuntimeError(f"{count} {what} are too many, and only {sum(available)} can go")
    heaps = torch.repeat_interleave(torch.tensor(available))
    chosen = heaps[torch.randperm(len(heaps))[:count]]
    counts: list[int] = torch.bincount(chosen, minlength=len(available)).tolist()
    return counts
