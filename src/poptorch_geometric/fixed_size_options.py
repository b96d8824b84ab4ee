"""Choose the sizes to which batches of graphs are padded. Source: PopTorch user guide,
"PopTorch ops".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tqdm.auto import tqdm

from poptorch.poptorch_core import Error, InvalidValue

from . import _graphs

SizesByType = int | dict[Any, int]
MANY = 10_000  # from this number of samples on, a progress bar is shown


def validate_num_graphs(num_graphs: int) -> None:
    """Check a number of graphs.

    Raises:
        ValueError: the number is below 2. One graph is for padding.
    """
    if num_graphs < 2:
        raise InvalidValue(
            "The number of graphs in a batch must be at least 2",
            got=f"{num_graphs}; one graph is needed for the padding",
            fix="count the padding graph: num_graphs = samples + 1",
        )


@dataclass
class FixedSizeOptions:
    """The sizes of every micro-batch, padding included, and the values of the padding.

    You may change all attributes later; loaders and collaters read them at each batch.

    Args:
        num_nodes: nodes of a micro-batch; by node type for heterogeneous graphs.
        num_edges: edges, by edge type for heterogeneous graphs. 0, the default, means
            ``n * (n - 1)`` for n nodes of all types.
        num_graphs: graphs, at least 2: one is padding.
        node_pad_value, edge_pad_value, graph_pad_value: fill tensors of nodes, edges and graphs
            with this value, cast to their dtype; default 0.0.
        pad_graph_defaults: values of padding graphs, by attribute. By default tensors have the fill
            value, and other attributes the value of the first sample.

    Raises:
        ValueError: there are fewer than 2 graphs.
    """

    num_nodes: SizesByType
    num_edges: SizesByType | None = None
    num_graphs: int = 2
    node_pad_value: float | None = None
    edge_pad_value: float | None = None
    graph_pad_value: float | None = None
    pad_graph_defaults: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        validate_num_graphs(self.num_graphs)
        if not self.num_edges:
            self.num_edges = self.total_num_nodes * (self.total_num_nodes - 1)
        self.node_pad_value = float(self.node_pad_value or 0)
        self.edge_pad_value = float(self.edge_pad_value or 0)
        self.graph_pad_value = float(self.graph_pad_value or 0)
        self.pad_graph_defaults = self.pad_graph_defaults or {}

    @property
    def total_num_nodes(self) -> int:
        """Nodes of all types."""
        return _graphs.total(self.num_nodes)

    @property
    def total_num_edges(self) -> int:
        """Edges of all types."""
        return _graphs.total(self.num_edges or 0)

    def is_hetero(self) -> bool:
        """Return whether the numbers of nodes and edges are given by type."""
        return isinstance(self.num_nodes, dict) and isinstance(self.num_edges, dict)

    def to_hetero(self, node_types: Sequence[Any], edge_types: Sequence[Any]) -> Self:
        """Use the present numbers for every type. Change these options and return them."""
        if not isinstance(self.num_nodes, dict):
            self.num_nodes = dict.fromkeys(node_types, self.num_nodes)
        if not isinstance(self.num_edges, dict):
            self.num_edges = dict.fromkeys(edge_types, self.num_edges or 0)
        return self

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        batch_size: int,
        sample_limit: int | None = None,
        progress_bar: bool | None = None,
    ) -> Self:
        """Choose sizes for any ``batch_size - 1`` samples and a padding graph.

        Args:
            dataset: single graphs, with a length.
            batch_size: graphs in a micro-batch, the padding graph included.
            sample_limit: inspect at most this number of samples.
            progress_bar: show a bar; by default from 10,000 samples on.

        Raises:
            ValueError: ``batch_size`` is below 2.
        """
        validate_num_graphs(batch_size)
        places = range(len(dataset))[:sample_limit]
        shown = len(places) >= MANY if progress_bar is None else progress_bar
        samples = (dataset[at] for at in tqdm(places, disable=not shown))
        nodes, edges, _ = _room(samples, batch_size - 1, "data set")
        return cls(nodes, edges, batch_size)

    @classmethod
    def from_loader(cls, loader: Iterable[Any], sample_limit: int = 1000) -> Self:
        """Choose sizes for the batches of a loader and a padding graph.

        Args:
            loader: yields graphs or batches. It is iterated again until the limit is reached.
            sample_limit: inspect this number of batches.
        """
        batches = itertools.islice(_repeated_batches(loader), sample_limit)
        nodes, edges, graphs = _room(batches, 1, "loader")
        return cls(nodes, edges, graphs + 1)


def _room(samples: Iterable[Any], real: int, what: str) -> tuple[SizesByType, SizesByType, int]:
    """Return sizes for ``real`` of the largest samples and padding, and the largest number of
    graphs in a sample.
    """
    nodes: dict[Any, int] = {}
    edges: dict[Any, int] = {}
    graphs = 0
    for sample in samples:
        for kind, count in _graphs.node_counts(sample).items():
            nodes[kind] = max(nodes.get(kind, 0), count)
        for kind, count in _graphs.edge_counts(sample).items():
            edges[kind] = max(edges.get(kind, 0), count)
        graphs = max(graphs, getattr(sample, "num_graphs", 1))
    if not graphs:
        raise Error(
            f"The {what} is empty",
            got="no graph from which sizes could be computed",
            fix="pass the sizes yourself: FixedSizeOptions(num_nodes, num_edges)",
        )
    return _times(real, nodes), _times(real, edges), graphs


def _times(real: int, largest: dict[Any, int]) -> SizesByType:
    sizes = {kind: size * real + 1 for kind, size in largest.items()}
    return sizes[None] if list(sizes) == [None] else sizes


def _repeated_batches(loader: Iterable[Any]) -> Iterator[Any]:
    batch = None
    while True:
        for batch in loader:
            yield batch
        if batch is None:
            return


def suited(sizes: FixedSizeOptions, sample: Any) -> FixedSizeOptions:
    """Convert the sizes in place if the sample has types but the sizes do not."""
    if _graphs.is_hetero(sample) and not sizes.is_hetero():
        sizes.to_hetero(sample.node_types, sample.edge_types)
    return sizes
