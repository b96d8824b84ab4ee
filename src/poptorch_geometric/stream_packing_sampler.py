"""Fill batches with graphs. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.data

from poptorch.poptorch_core import Error, InvalidValue, StateError, Unsupported

from . import _graphs

Limit = int | Mapping[Any, int]


class StreamPackingSampler(torch.utils.data.Sampler[list[int]]):
    """Yield the indices of one micro-batch after another, each filled greedily.

    A micro-batch takes samples while graphs, nodes and edges fit. It leaves some nodes and edges
    for each padding graph. The order is kept. All arguments can be read as attributes.

    Args:
        data_source: a data set of graphs.
        max_num_graphs: graphs in a micro-batch.
        max_num_nodes, max_num_edges: in a micro-batch, of all types or by type. Default: those of
            the largest sample times ``max_num_graphs``.
        base_sampler: the order of the samples, with a length; by default that of the data set.
        allow_skip_data: leave out samples that are too large for a micro-batch.

    Raises:
        ValueError: ``max_num_graphs`` is missing or less than 1, there are fewer nodes or edges
            than graphs, or ``base_sampler`` has no samples.
    """

    _trims = False  # whether samples that are too large become separate micro-batches
    reads_to_count = True  # a loader should not read the length just to warn about a remainder

    def __init__(
        self,
        data_source: Any,
        max_num_graphs: int,
        max_num_nodes: Limit | None = None,
        max_num_edges: Limit | None = None,
        base_sampler: Any = None,
        allow_skip_data: bool = False,
    ) -> None:
        if max_num_graphs is None or max_num_graphs < 1:
            raise InvalidValue(
                "max_num_graphs must be at least 1",
                got=repr(max_num_graphs),
                fix="pass the number of graphs of a micro-batch",
            )
        self.data_source, self.max_num_graphs = data_source, max_num_graphs
        if base_sampler is None:
            base_sampler = torch.utils.data.SequentialSampler(data_source)
        if len(base_sampler) == 0:
            raise InvalidValue(
                "base_sampler has no samples",
                got=repr(base_sampler),
                fix="add at least one graph to the data set, or pass another base_sampler",
            )
        self.base_sampler = base_sampler
        if max_num_nodes is None:
            max_num_nodes = max_num_graphs * _largest(data_source, _graphs.node_counts)
        if max_num_edges is None:
            max_num_edges = max_num_graphs * _largest(data_source, _graphs.edge_counts)
        for what, limit in (("nodes", max_num_nodes), ("edges", max_num_edges)):
            if _graphs.total(limit) < max_num_graphs:
                raise InvalidValue(
                    f"max_num_{what} must not be below max_num_graphs",
                    got=f"{limit} {what} for {max_num_graphs} graphs",
                    fix=(
                        "pass a limit of at least max_num_graphs, because one node and one edge "
                        "are kept for each graph that a micro-batch can still take"
                    ),
                )
        self.max_num_nodes, self.max_num_edges = max_num_nodes, max_num_edges
        self.allow_skip_data = allow_skip_data
        self._length: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        pack: list[int] = []
        nodes: Counter[Any] = Counter()
        edges: Counter[Any] = Counter()
        for index in self.base_sampler:
            sample = self.data_source[index]
            own = Counter(_graphs.node_counts(sample)), Counter(_graphs.edge_counts(sample))
            if not self._fits(1, *own):
                if self._trims:
                    yield [index]
                elif not self.allow_skip_data:
                    raise self._too_small(index, *own)
                continue
            if not self._fits(len(pack) + 1, nodes + own[0], edges + own[1]):
                yield pack
                pack, nodes, edges = [], Counter(), Counter()
            pack.append(index)
            nodes, edges = nodes + own[0], edges + own[1]
        if pack:
            yield pack

    def _too_small(self, index: int, nodes: Counter[Any], edges: Counter[Any]) -> StateError:
        return StateError(
            "The limits are too small to fit in the single sample",
            got=f"sample {index} has nodes {dict(nodes)} and edges {dict(edges)}; a micro-batch "
            f"has space for {self.max_num_nodes} and {self.max_num_edges}, and other graphs need "
            f"{self.max_num_graphs - 1} of each",
            fix=(
                (
                    "allow more nodes and edges, or fewer graphs: num_nodes, num_edges and "
                    "num_graphs of FixedSizeOptions, or max_num_nodes, max_num_edges and "
                    "max_num_graphs of StreamPackingSampler"
                ),
                "or leave such samples out: allow_skip_data=True, or OverSizeStrategy.Skip",
            ),
        )

    def _fits(self, graphs: int, nodes: Counter[Any], edges: Counter[Any]) -> bool:
        left = self.max_num_graphs - graphs
        return 0 <= left <= min(_room(self.max_num_nodes, nodes), _room(self.max_num_edges, edges))

    def __len__(self) -> int:
        """Return the number of micro-batches in one iteration.

        Raises:
            NotImplementedError: the order is random, so the number is, too.
        """
        if isinstance(self.base_sampler, torch.utils.data.RandomSampler):
            raise Unsupported(
                "The number of micro-batches depends on a random order",
                got="len() of a StreamPackingSampler whose base_sampler is a RandomSampler",
                fix=(
                    (
                        "count the micro-batches while you iterate, because another order may "
                        "give another number"
                    ),
                    "or omit shuffle, or pass a base_sampler with a fixed order",
                ),
            )
        if self._length is None:
            self._length = sum(1 for _ in self)
        return self._length


def _largest(samples: Any, counts: Callable[[Any], dict[Any, int]]) -> int:
    return max(sum(counts(samples[at]).values()) for at in range(len(samples)))


def _room(limit: Limit, taken: Mapping[Any, int]) -> int:
    """Return how many more fit, of all types; negative if there are too many of one type."""
    if isinstance(limit, Mapping):
        for kind, count in taken.items():
            if kind not in limit:
                raise Error(
                    f"max_num_nodes or max_num_edges has no entry for type {kind!r}",
                    got=f"there are entries for {list(limit)}",
                    fix=f"add an entry for {kind!r}, or pass one int for all types",
                )
            if count > limit[kind]:
                return -1
    return _graphs.total(limit) - sum(taken.values())
