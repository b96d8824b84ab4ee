"""Small graphs for the tests of poptorch_geometric."""

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

import poptorch
import poptorch_geometric as pg

TYPES = ("v0", "v1")
EDGES = (("v0", "e0", "v1"), ("v1", "e1", "v0"), ("v0", "e2", "v0"))


def graph(nodes: int, number: int = 0, of_nodes: bool = False) -> Data:
    """A ring of nodes. Features identify the graph, and ``place`` identifies the node."""
    ring = torch.arange(nodes)
    return Data(
        x=torch.full((nodes, 2), float(number + 1)),
        place=ring,
        edge_index=torch.stack([ring, (ring + 1) % max(nodes, 1)]),
        edge_attr=torch.full((nodes, 1), float(number + 1)),
        y=torch.full((nodes if of_nodes else 1,), number),
    )


def graphs(count: int = 9) -> list[Data]:
    """Rings of 2, 3, 4, 2, ... nodes."""
    return [graph(2 + at % 3, at) for at in range(count)]


def molecules(count: int) -> list[Data]:
    """Rings with random features; ``y`` is the sum of these."""
    generator = torch.Generator().manual_seed(3)
    samples = graphs(count)
    for sample in samples:
        sample.x = torch.randn(sample.x.shape, generator=generator)
        sample.y = sample.x.sum().view(1)
    return samples


def random_graph(nodes: int = 60, edges: int = 240, classes: int = 3) -> Data:
    """One graph, undirected and without loops, with node labels and a mask."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(nodes, (2, edges), generator=generator)
    pairs = pairs[:, pairs[0] != pairs[1]]
    pairs = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    return Data(
        x=torch.randn(nodes, 4, generator=generator),
        edge_index=pairs,
        edge_attr=torch.arange(pairs.shape[1]).float(),
        y=torch.randint(classes, (nodes,), generator=generator),
        train_mask=torch.ones(nodes, dtype=torch.bool),
    )


def hetero(v0: int = 3, v1: int = 4, number: int = 0) -> HeteroData:
    """A graph with two types of nodes, three of edges, and a ``label`` of the whole graph.

    Args:
        v0: nodes of the first type.
        v1: nodes of the second type.
        number: features tell which graph they belong to.
    """
    data = HeteroData()
    data["v0"].x = torch.full((v0, 2), float(number + 1))
    data["v1"].x = torch.full((v1, 3), float(number + 1))
    data["v0"].y = torch.full((v0,), number)
    for source, name, target in EDGES:
        count = min(data[source].num_nodes, data[target].num_nodes)
        both = torch.arange(count)
        data[source, name, target].edge_index = torch.stack([both, both])
        data[source, name, target].edge_attr = torch.full((count, 1), float(number + 1))
    data.label = torch.full((1,), number)
    return data


def heteros(count: int = 6) -> list[HeteroData]:
    """Graphs with types, of 2 to 4 nodes of each."""
    return [hetero(2 + at % 3, 3 + at % 2, at) for at in range(count)]


def hetero_graph() -> HeteroData:
    """One graph with types and random edges: 30 and 40 nodes, 90 edges of each type."""
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    data["v0"].x = torch.randn(30, 2, generator=generator)
    data["v1"].x = torch.randn(40, 3, generator=generator)
    for source, name, target in EDGES:
        ends = [
            torch.randint(data[end].num_nodes, (90,), generator=generator)
            for end in (source, target)
        ]
        data[source, name, target].edge_index = torch.stack(ends)
    data["v0"].y = torch.arange(30) % 2
    return data


Shape = tuple[tuple[int, ...], torch.dtype]


def shapes(batch: Data | HeteroData) -> dict[tuple[Any, str], Shape]:
    """Shape and dtype of every tensor of a batch, by store and name."""
    return {
        (store._key, name): (tuple(value.shape), value.dtype)
        for store in batch.stores
        for name, value in store.items()
        if isinstance(value, torch.Tensor)
    }


def same(first: Data | HeteroData, second: Data | HeteroData) -> bool:
    """Whether two graphs have the same tensors, by store and name."""
    if shapes(first) != shapes(second):
        return False
    return all(
        torch.equal(ours[name], value)
        for ours, theirs in zip(first.stores, second.stores, strict=True)
        for name, value in theirs.items()
        if isinstance(value, torch.Tensor)
    )


def sizes(nodes: int = 14, edges: int = 16, count: int = 4, **others: Any) -> pg.FixedSizeOptions:
    """Sizes that a few of these graphs fit into."""
    return pg.FixedSizeOptions(nodes, edges, count, **others)


class Layer(torch.nn.Module):
    """A layer whose last arguments are fixed, and the mean of squares of what it returns."""

    def __init__(self, layer: torch.nn.Module, *last: int) -> None:
        super().__init__()
        self.layer = layer
        self.last = last

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(*inputs, *self.last)
        return out, poptorch.identity_loss(out.square(), "mean")
