"""Neighbour sampling in torch, where no package with a compiled sampler is installed.

Source: Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs" (2017); for
weighted draws Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch_geometric.data import HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType

from poptorch.poptorch_core import Error, Unsupported

from . import _graphs


@dataclass(frozen=True)
class _Incoming:
    """The edges of one type, sorted by where they lead."""

    first: torch.Tensor
    source: torch.Tensor
    number: torch.Tensor
    weight: torch.Tensor | None
    time: torch.Tensor | None

    def of(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _graphs.ranges(self.first[nodes], self.first[nodes + 1] - self.first[nodes])


@dataclass
class _Met:
    """The nodes of one type that were met, in order; with a seed each where trees are disjoint."""

    size: int
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    per_hop: list[int] = field(default_factory=list)

    def add(self, keys: torch.Tensor) -> torch.Tensor:
        new: torch.Tensor = torch.unique(keys)
        new = new[~torch.isin(new, self.keys)]
        self.keys = torch.cat([self.keys, new])
        return new

    def places(self, keys: torch.Tensor) -> torch.Tensor:
        order = self.keys.argsort()
        places: torch.Tensor = order[torch.searchsorted(self.keys[order], keys)]
        return places


class NeighborSampler(BaseSampler):  # type: ignore[misc]
    """Samples as torch_geometric's ``NeighborSampler`` does, in torch alone."""

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
        self._typed = isinstance(data, HeteroData)
        self._counts = _graphs.node_counts(data)
        self._subgraph = SubgraphType(subgraph_type)
        self._replace, self._disjoint = replace, disjoint or time_attr is not None
        if temporal_strategy not in ("uniform", "last"):
            raise Error("Unknown temporal_strategy", got=repr(temporal_strategy),
                        fix='"uniform" or "last"')  # fmt: skip
        self._last = temporal_strategy == "last"
        given = num_neighbors
        if not isinstance(given, NumNeighbors):
            given = NumNeighbors(given)
        kinds = list(_graphs.edge_stores(data))
        values = given.get_values(kinds if self._typed else None)
        self._fanouts = values if self._typed else {None: values}
        self._hops = given.num_hops
        self._times: dict[Any, torch.Tensor] = {
            kind: store[time_attr]
            for kind, store in _graphs.node_stores(data).items()
            if time_attr is not None and time_attr in store and _of_nodes(data, kind, time_attr)
        }
        self._edges = {
            kind: _incoming(store, self._counts, kind, weight_attr,
                            None if self._times else time_attr)
            for kind, store in _graphs.edge_stores(data).items()
        }  # fmt: skip

    @property
    def edge_permutation(self) -> None:
        return  # numbers of edges are those of the whole graph

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> Any:
        met = {kind: _Met(count) for kind, count in self._counts.items()}
        seeds = torch.arange(len(index.node)) if self._disjoint else 0
        met[index.input_type].keys = index.node + seeds * met[index.input_type].size
        fronts = {kind: each.keys for kind, each in met.items()}
        for each in met.values():
            each.per_hop.append(len(each.keys))
        times = self._seed_times(index)
        drawn: dict[Any, list[tuple[torch.Tensor, ...]]] = {kind: [] for kind in self._edges}
        for hop in range(self._hops):
            reached: dict[Any, list[torch.Tensor]] = {kind: [] for kind in met}
            for kind, edges in self._edges.items():
                source, target = _graphs.ends(kind)
                hits = self._draw(edges, fronts[target], self._fanouts[kind][hop], source, target,
                                  times)  # fmt: skip
                drawn[kind].append(hits)
                reached[source].append(hits[0])
            for kind, each in met.items():
                new = each.add(torch.cat(reached[kind])) if reached[kind] else each.keys[:0]
                fronts[kind] = new
                each.per_hop.append(len(new))
        output = self._output(met, drawn)
        output.metadata = (index.input_id, index.time)
        if self._subgraph == SubgraphType.bidirectional:
            return output.to_bidirectional()
        return output

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            "This sampler starts from nodes",
            got="sample_from_edges, for the neighbourhoods of edges",
            fix=(
                "sample from the nodes at their ends: FixedSizeNeighborLoader",
                "pass a neighbor_sampler of your own that starts from edges",
            ),
        )

    def _seed_times(self, index: NodeSamplerInput) -> torch.Tensor | None:
        given: torch.Tensor | None = index.time
        if given is None and index.input_type in self._times:
            given = self._times[index.input_type][index.node]
        if given is not None:
            return given
        if any(edges.time is not None for edges in self._edges.values()):
            raise Error(
                "Sampling by the time of edges needs the time of every seed",
                fix="FixedSizeNeighborLoader(..., input_time=...)",
            )
        return None

    def _draw(
        self,
        edges: _Incoming,
        front: torch.Tensor,
        fanout: int,
        source: Any,
        target: Any,
        times: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys of sources, keys of targets and numbers of the edges that are drawn."""
        size = max(self._counts[target], 1)
        nodes, seeds = front % size, front // size if self._disjoint else None
        slots, owner = edges.of(nodes)
        when = self._when(edges, slots, source)
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

    def _when(self, edges: _Incoming, slots: torch.Tensor, source: Any) -> torch.Tensor | None:
        if edges.time is not None:
            return edges.time[slots]
        times = self._times.get(source)
        return None if times is None else times[edges.source[slots]]

    def _choose(
        self,
        edges: _Incoming,
        owner: torch.Tensor,
        slots: torch.Tensor,
        when: torch.Tensor | None,
        fanout: int,
        count: int,
    ) -> torch.Tensor:
        """Return which candidates are drawn: at most ``fanout`` of each owner; sorted by owner."""
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

    def _output(self, met: Mapping[Any, _Met], drawn: Mapping[Any, Any]) -> Any:
        nodes = {kind: each.keys % max(each.size, 1) for kind, each in met.items()}
        rows, cols, numbers, per_hop = {}, {}, {}, {}
        for kind, hops in drawn.items():
            source, target = _graphs.ends(kind)
            if self._subgraph == SubgraphType.induced:
                hops = [self._between(self._edges[kind], met[source], met[target])]
            parts = [torch.cat(part) for part in zip(*hops, strict=True)]
            rows[kind], cols[kind] = met[source].places(parts[0]), met[target].places(parts[1])
            numbers[kind] = parts[2]
            per_hop[kind] = [len(hop[0]) for hop in hops]
        owners = {kind: each.keys // max(each.size, 1) for kind, each in met.items()}
        batch = owners if self._disjoint else None
        hop_nodes = {kind: each.per_hop for kind, each in met.items()}
        if self._typed:
            return HeteroSamplerOutput(nodes, rows, cols, numbers, batch, hop_nodes, per_hop)
        return SamplerOutput(nodes[None], rows[None], cols[None], numbers[None],
                             batch and batch[None], hop_nodes[None], per_hop[None])  # fmt: skip

    def _between(
        self, edges: _Incoming, source: _Met, target: _Met
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nodes, seeds = target.keys % max(target.size, 1), target.keys // max(target.size, 1)
        slots, owner = edges.of(nodes)
        sources = edges.source[slots] + seeds[owner] * source.size
        inside = torch.isin(sources, source.keys)
        return sources[inside], target.keys[owner][inside], edges.number[slots][inside]


def _incoming(
    store: Any,
    counts: Mapping[Any, int],
    kind: Any,
    weight: str | None,
    time: str | None,
) -> _Incoming:
    row, col = store["edge_index"]
    order = col.argsort(stable=True)
    ends = torch.bincount(col, minlength=counts[_graphs.ends(kind)[1]]).cumsum(0)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return _Incoming(
        first, row[order], order, _attribute(store, weight, order), _attribute(store, time, order)
    )


def _attribute(store: Any, name: str | None, order: torch.Tensor) -> torch.Tensor | None:
    if name is None:
        return None
    if name not in store:
        raise Error("The graph does not have the attribute to sample by", got=repr(name),
                    fix=f"it has {', '.join(map(str, store.keys()))}")  # fmt: skip
    chosen: torch.Tensor = store[name][order]
    return chosen


def _of_nodes(data: Any, kind: Any, name: str) -> bool:
    return kind is not None or bool(data.is_node_attr(name))


def _with_replacement(
    edges: _Incoming,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    before: torch.Tensor,
    fanout: int,
) -> torch.Tensor:
    """Draw ``fanout`` candidates of every owner that has any."""
    some = lengths.nonzero()[:, 0].repeat_interleave(fanout)
    if edges.weight is None:
        draws = (torch.rand(len(some), dtype=torch.float64) * lengths[some]).long()
        return before[some] + draws.clamp(max=lengths[some] - 1)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), edges.weight[slots].double().cumsum(0)])
    low, high = sums[before[some]], sums[before[some] + lengths[some]]
    at = low + torch.rand(len(some), dtype=torch.float64) * (high - low)
    return (torch.searchsorted(sums, at, right=True) - 1).clamp(
        before[some], before[some] + lengths[some] - 1
    )
