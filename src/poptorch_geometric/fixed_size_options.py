"""To what sizes batches of graphs are padded. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

Sizes = int | dict[Any, int]


class FixedSizeStrategy(enum.IntEnum):
    """How samples become batches."""

    PadToMax = 0
    StreamPack = 1


class OverSizeStrategy(enum.IntEnum):
    """What becomes of samples that are too large for a batch."""

    Error = 0
    Skip = 1
    TrimNodes = 2
    TrimEdges = 3
    TrimNodesAndEdges = 4


@dataclass
class FixedSizeOptions:
    """The sizes of every batch, padding included, and what it is padded with.

    Args:
        num_nodes: in one batch; by node type for heterogeneous graphs.
        num_edges: default ``n * (n - 1)`` for n nodes; by edge type.
        num_graphs: at least 2: one is for padding.
        node_pad_value, edge_pad_value, graph_pad_value: default 0.
        pad_graph_defaults: values by attribute, instead of these.

    Raises:
        ValueError: fewer than 2 graphs.
    """

    num_nodes: Sizes
    num_edges: Sizes | None = None
    num_graphs: int = 2
    node_pad_value: float | None = None
    edge_pad_value: float | None = None
    graph_pad_value: float | None = None
    pad_graph_defaults: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.num_graphs < 2:
            raise ValueError(
                f"num_graphs must be at least 2, one of them for padding, not {self.num_graphs}"
            )
        if self.num_edges is None:
            self.num_edges = self.total_num_nodes * (self.total_num_nodes - 1)
        self.node_pad_value = 0.0 if self.node_pad_value is None else self.node_pad_value
        self.edge_pad_value = 0.0 if self.edge_pad_value is None else self.edge_pad_value
        self.graph_pad_value = 0.0 if self.graph_pad_value is None else self.graph_pad_value
        self.pad_graph_defaults = self.pad_graph_defaults or {}

    @property
    def total_num_nodes(self) -> int:
        """Nodes of all types."""
        return _total(self.num_nodes)

    @property
    def total_num_edges(self) -> int:
        """Edges of all types."""
        assert self.num_edges is not None
        return _total(self.num_edges)

    def is_hetero(self) -> bool:
        """Tell whether sizes are given by type."""
        return isinstance(self.num_nodes, dict) or isinstance(self.num_edges, dict)

    def to_hetero(self, node_types: Sequence[Any], edge_types: Sequence[Any]) -> Self:
        """Give every type the sizes that there are; changes these options and returns them."""
        if not isinstance(self.num_nodes, dict):
            self.num_nodes = dict.fromkeys(node_types, self.num_nodes)
        if not isinstance(self.num_edges, dict):
            assert self.num_edges is not None
            self.num_edges = dict.fromkeys(edge_types, self.num_edges)
        return self

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        batch_size: int,
        sample_limit: int | None = None,
        progress_bar: bool | None = None,
    ) -> Self:
        """Choose sizes that any ``batch_size - 1`` samples and a padding graph fit into.

        Args:
            dataset: of single graphs.
            batch_size: graphs in a batch, the padding graph included.
            sample_limit: look at so many samples only.
            progress_bar: taken for compatibility; looking takes no time worth showing.
        """
        samples = [dataset[at] for at in range(len(dataset))[:sample_limit]]
        nodes, edges = _largest(samples)
        real = batch_size - 1
        return cls(nodes * real + 1, edges * real + 1, num_graphs=batch_size)

    @classmethod
    def from_loader(cls, loader: Iterable[Any], sample_limit: int = 1000) -> Self:
        """Choose sizes that the batches of a loader and a padding graph fit into.

        Args:
            loader: is iterated again if it has fewer batches than ``sample_limit``.
        """
        batches = list(itertools.islice(_again_and_again(loader), sample_limit))
        nodes, edges = _largest(batches)
        graphs = max(getattr(batch, "num_graphs", 1) for batch in batches)
        return cls(nodes + 1, edges + 1, num_graphs=graphs + 1)


def _total(sizes: Sizes) -> int:
    return sum(sizes.values()) if isinstance(sizes, Mapping) else sizes


def _largest(graphs: Sequence[Any]) -> tuple[int, int]:
    return max(g.num_nodes for g in graphs), max(g.num_edges for g in graphs)


def _again_and_again(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        before = None
        for before in loader:
            yield before
        if before is None:
            return
