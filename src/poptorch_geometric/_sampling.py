"""Sample neighbours with torch, if no package with a compiled sampler is installed.

Source: Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs" (2017); for
weighted draws Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType

from poptorch.poptorch_core import Error, Unsupported

from . import _graphs


@dataclass
class _Incoming:
    """The edges of one type, sorted by their targets."""

    first: Tensor
    source: Tensor
    number: Tensor
    weight: Tensor | None
    time: Tensor | None

    def of(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        return _graphs.ranges(self.first[nodes], self.first[nodes + 1] - self.first[nodes])


@dataclass
class _SampledNodes:
    """The sampled nodes of one type, in order. With disjoint trees, each has the number of
    its seed.
    """

    size: int
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    per_hop: list[int] = field(default_factory=list)

    def split(self) -> tuple[Tensor, Tensor]:
        return self.keys % self.size, self.keys // self.size

    def add(self, keys: Tensor) -> Tensor:
        new: Tensor = torch.unique(keys)
        new = new[~torch.isin(new, self.keys)]
        self.keys = torch.cat([self.keys, new])
        self.per_hop.append(len(new))
        return new

    def places(self, keys: Tensor) -> Tensor:
        order = self.keys.argsort()
        places: Tensor = order[torch.searchsorted(self.keys[order], keys)]
        return places


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Samples like torch_geometric's ``NeighborSampler``, but only with torch."""

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
    ) -> None:
        self._typed = _graphs.is_hetero(data)
        # 1 if there are no nodes, because keys are divided by it.
        self._counts = {kind: max(n, 1) for kind, n in _graphs.node_counts(data).items()}
        self._subgraph = SubgraphType(subgraph_type)
        self._replace, self._disjoint = replace, disjoint or time_attr is not None
        if temporal_strategy not in ("uniform", "last"):
            raise Error("Unknown temporal_strategy", got=repr(temporal_strategy),
                        fix='use "uniform" or "last"')  # fmt: skip
        self._last = temporal_strategy == "last"
        given = num_neighbors
        if not isinstance(given, NumNeighbors):
            given = NumNeighbors(given)
        edges = _graphs.edge_stores(data)
        values = given.get_values(list(edges) if self._typed else None)
        self._fanouts = values if self._typed else {None: values}
        self._hops = given.num_hops
        self._times: dict[Any, Tensor] = {
            kind: store[time_attr]
            for kind, store in _graphs.node_stores(data).items()
            if time_attr is not None and time_attr in store and store.is_node_attr(time_attr)
        }
        self._edges = {}
        for kind, store in edges.items():
            source, target = _graphs.ends(kind)
            self._edges[kind] = _incoming(
                store, self._counts[target], weight_attr, None if self._times else time_attr
            )
            if source in self._times:
                self._edges[kind].time = self._times[source][self._edges[kind].source]

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> Any:
        met = {kind: _SampledNodes(count) for kind, count in self._counts.items()}
        seeds = torch.arange(len(index.node)) if self._disjoint else 0
        met[index.input_type].keys = index.node + seeds * met[index.input_type].size
        fronts = {kind: each.keys for kind, each in met.items()}
        for each in met.values():
            each.per_hop.append(len(each.keys))
        times = self._seed_times(index)
        drawn: dict[Any, list[tuple[Tensor, ...]]] = {kind: [] for kind in self._edges}
        for hop in range(self._hops):
            reached = {kind: [each.keys[:0]] for kind, each in met.items()}
            for kind in self._edges:
                hits = self._draw(kind, fronts, self._fanouts[kind][hop], times)
                drawn[kind].append(hits)
                reached[_graphs.ends(kind)[0]].append(hits[0])
            fronts = {kind: each.add(torch.cat(reached[kind])) for kind, each in met.items()}
        output = self._output(met, drawn)
        output.metadata = (index.input_id, index.time)
        if self._subgraph == SubgraphType.bidirectional:
            return output.to_bidirectional()
        return output

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            "This sampler can only start from nodes",
            got="sample_from_edges, which samples the neighbourhoods of edges",
            fix=(
                "sample from the end nodes of the edges: FixedSizeNeighborLoader",
                "or pass your own neighbor_sampler that starts from edges",
            ),
        )

    def _seed_times(self, index: NodeSamplerInput) -> Tensor | None:
        if index.time is not None or index.input_type not in self._times:
            given: Tensor | None = index.time
        else:
            given = self._times[index.input_type][index.node]
        of_edges = not self._times and any(e.time is not None for e in self._edges.values())
        if given is None and of_edges:
            raise Error(
                "Sampling by the time of edges needs the time of every seed node",
                fix=(
                    "pass the times of the seed nodes: FixedSizeNeighborLoader(..., input_time=...)"
                ),
            )
        return given

    def _draw(
        self, kind: Any, fronts: Mapping[Any, Tensor], fanout: int, times: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys of sources, keys of targets and numbers of the sampled edges."""
        source, target = _graphs.ends(kind)
        edges, front, size = self._edges[kind], fronts[target], self._counts[target]
        seeds = front // size if self._disjoint else None
        slots, owner = edges.of(front % size)
        when = None if edges.time is None else edges.time[slots]
        if when is not None and times is not None and seeds is not None:
            early = when <= times[seeds[owner]]
            owner, slots, when = owner[early], slots[early], when[early]
        if fanout >= 0:
            chosen = self._choose(edges, owner, slots, when, fanout, len(front))
            owner, slots = owner[chosen], slots[chosen]
        sources = edges.source[slots]
        if seeds is not None:
            sources = sources + seeds[owner] * self._counts[source]
        return sources, front[owner], edges.number[slots]

    def _choose(
        self,
        edges: _Incoming,
        owner: Tensor,
        slots: Tensor,
        when: Tensor | None,
        fanout: int,
        count: int,
    ) -> Tensor:
        """Return the sampled candidates, sorted by owner: at most ``fanout`` for each owner."""
        lengths = torch.bincount(owner, minlength=count)
        before = lengths.cumsum(0) - lengths
        if self._replace and not (self._last and when is not None):
            return _with_replacement(edges, slots, lengths, before, fanout)
        if self._last and when is not None:
            rank = -when.double()
        else:
            rank = -torch.rand(len(owner), dtype=torch.float64).clamp_min(1e-300).log()
            if edges.weight is not None:
                rank = rank / edges.weight[slots].double()
        order = rank.argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]
        place = torch.arange(len(owner)) - before[owner[order]]
        return order[place < fanout].sort().values

    def _output(self, met: Mapping[Any, _SampledNodes], drawn: Mapping[Any, Any]) -> Any:
        split = {kind: each.split() for kind, each in met.items()}
        nodes = {kind: found for kind, (found, _) in split.items()}
        batch = {kind: seeds for kind, (_, seeds) in split.items()} if self._disjoint else None
        rows, cols, numbers, per_hop = {}, {}, {}, {}
        for kind, hops in drawn.items():
            source, target = _graphs.ends(kind)
            if self._subgraph == SubgraphType.induced:
                hops = [self._between(self._edges[kind], met[source], met[target])]
            parts = [torch.cat(part) for part in zip(*hops, strict=True)]
            rows[kind], cols[kind] = met[source].places(parts[0]), met[target].places(parts[1])
            numbers[kind] = parts[2]
            per_hop[kind] = [len(hop[0]) for hop in hops]
        hop_nodes = {kind: each.per_hop for kind, each in met.items()}
        if self._typed:
            return HeteroSamplerOutput(nodes, rows, cols, numbers, batch, hop_nodes, per_hop)
        return SamplerOutput(nodes[None], rows[None], cols[None], numbers[None],
                             batch and batch[None], hop_nodes[None], per_hop[None])  # fmt: skip

    def _between(
        self, edges: _Incoming, source: _SampledNodes, target: _SampledNodes
    ) -> tuple[Tensor, Tensor, Tensor]:
        nodes, seeds = target.split()
        slots, owner = edges.of(nodes)
        sources = edges.source[slots] + seeds[owner] * source.size
        inside = torch.isin(sources, source.keys)
        return sources[inside], target.keys[owner][inside], edges.number[slots][inside]


def _incoming(store: Any, nodes: int, weight: str | None, time: str | None) -> _Incoming:
    row, col = store["edge_index"]
    order = col.argsort(stable=True)
    ends = torch.bincount(col, minlength=nodes).cumsum(0)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return _Incoming(
        first, row[order], order, _attribute(store, weight, order), _attribute(store, time, order)
    )


def _attribute(store: Any, name: str | None, order: Tensor) -> Tensor | None:
    if name is None:
        return None
    if name not in store:
        raise Error(
            "The graph does not have the attribute by which edges are sampled",
            got=repr(name),
            fix=f"use an attribute of the graph: {', '.join(map(str, store.keys()))}",
        )
    values: Tensor = store[name]
    return values[order]


def _with_replacement(
    edges: _Incoming, slots: Tensor, lengths: Tensor, before: Tensor, fanout: int
) -> Tensor:
    """Draw ``fanout`` candidates for every owner that has any."""
    some = lengths.nonzero()[:, 0].repeat_interleave(fanout)
    weights = torch.ones(len(slots)) if edges.weight is None else edges.weight[slots]
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), weights.double().cumsum(0)])
    low, high = sums[before[some]], sums[before[some] + lengths[some]]
    at = low + torch.rand(len(some), dtype=torch.float64) * (high - low)
    return (torch.searchsorted(sums, at, right=True) - 1).clamp(
        before[some], before[some] + lengths[some] - 1
    )
