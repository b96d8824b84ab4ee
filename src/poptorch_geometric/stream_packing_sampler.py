"""Batches that hold as many graphs as fit. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.utils.data


class StreamPackingSampler(torch.utils.data.Sampler[list[int]]):
    """Yields the indices of one batch after another, filling each greedily.

    A sample joins a batch while graphs, nodes and edges fit and enough nodes and edges are left
    for the graphs that may still come.

    Args:
        data_source: a data set of graphs.
        max_num_graphs: in one batch.
        max_num_nodes, max_num_edges: in one batch; None for any number.
        base_sampler: the order of the samples; by default as they are.
        allow_skip_data: leave out samples that are too large for a batch.

    Raises:
        ValueError: fewer nodes or edges than graphs.
    """

    def __init__(
        self,
        data_source: Any,
        max_num_graphs: int,
        max_num_nodes: int | None = None,
        max_num_edges: int | None = None,
        base_sampler: Any = None,
        allow_skip_data: bool = False,
    ) -> None:
        for what, limit in (("nodes", max_num_nodes), ("edges", max_num_edges)):
            if limit is not None and limit < max_num_graphs:
                raise ValueError(f"{limit} {what} are fewer than {max_num_graphs} graphs")
        self._source, self._graphs = data_source, max_num_graphs
        self._nodes = math.inf if max_num_nodes is None else max_num_nodes
        self._edges = math.inf if max_num_edges is None else max_num_edges
        self._base = base_sampler or torch.utils.data.SequentialSampler(data_source)
        self._skips = allow_skip_data
        self._length: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        nodes = edges = 0
        for index in self._base:
            graph = self._source[index]
            if not self._fits(1, graph.num_nodes, graph.num_edges):
                if self._skips:
                    continue
                raise RuntimeError(
                    f"Sample {index} with {graph.num_nodes} nodes and {graph.num_edges} edges is "
                    f"too large for a batch of {self._nodes} and {self._edges}"
                )
            if not self._fits(len(batch) + 1, nodes + graph.num_nodes, edges + graph.num_edges):
                yield batch
                batch, nodes, edges = [], 0, 0
            batch.append(index)
            nodes, edges = nodes + graph.num_nodes, edges + graph.num_edges
        if batch:
            yield batch

    def _fits(self, graphs: int, nodes: int, edges: int) -> bool:
        left = self._graphs - graphs
        return left >= 0 and min(self._nodes - nodes, self._edges - edges) >= left

    def __len__(self) -> int:
        """How many batches one iteration has.

        Raises:
            NotImplementedError: the order is random, and the number with it.
        """
        if isinstance(self._base, torch.utils.data.RandomSampler):
            raise NotImplementedError("the number of batches depends on a random order")
        if self._length is None:
            self._length = sum(1 for _ in self)
        return self._length
