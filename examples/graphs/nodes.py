"""Classify nodes by sampling their neighbours: which part of a house is a node?

torch_geometric generates the graph, without a download: a random graph to which small "houses" of
five nodes are attached. Nodes can only be distinguished by their neighbourhoods.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.datasets import ExplainerDataset
from torch_geometric.datasets.graph_generator import BAGraph
from torch_geometric.utils import degree

import comparison
import poptorch
import poptorch_geometric as pg
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader

SEEDS, DEGREES = 32, 16


class Classifier(torch.nn.Module):
    """GraphSAGE. The seeds are the first nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = pyg.GraphSAGE(DEGREES, 64, num_layers=2, out_channels=4)

    def forward(self, x, edge_index, y):
        out = self.network(x, edge_index)[:SEEDS]
        return out, F.cross_entropy(out, y[:SEEDS])


def graph(small: bool) -> Data:
    """Return houses on a random graph. The features are the degrees."""
    nodes, houses = (200, 40) if small else (2000, 400)
    made = ExplainerDataset(BAGraph(nodes, num_edges=3), "house", num_motifs=houses)[0]
    degrees = degree(made.edge_index[0], made.num_nodes).long().clamp(max=DEGREES) - 1
    return Data(x=F.one_hot(degrees, DEGREES).float(), edge_index=made.edge_index, y=made.y)


def sampled(loader: Any, seeds: int, updates: int) -> Iterator[tuple[Any, Any]]:
    """Yield neighbourhoods of seeds, as they are and padded."""
    order: list[int] = []
    for _ in range(updates):
        if len(order) < SEEDS:
            order = torch.randperm(seeds).tolist()
        native = loader.nativeCollate([order.pop() for _ in range(SEEDS)])
        padded = loader.fixedSizeCollate(native)
        yield ([(part.x, part.edge_index, part.y)] for part in (native, padded))


def main(arguments: Sequence[str] | None = None) -> tuple[comparison.Run, comparison.Run]:
    """Train both and print their results."""
    args = comparison.parser(__doc__, 300).parse_args(arguments)
    options = comparison.settings(args)
    data = graph(args.small)
    order = torch.randperm(data.num_nodes)
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    sizes = pg.FixedSizeOptions(num_nodes=650, num_edges=900)  # about 500 and 700 are usual
    loader = FixedSizeNeighborLoader(
        data, [10, 5], input_nodes=train, batch_size=SEEDS, fixed_size_options=sizes,
        options=options,
    )  # fmt: skip
    model = Classifier()
    ours = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = poptorch.trainingModel(ours, options, torch.optim.Adam(ours.parameters(), lr=0.01))
    runs = comparison.side_by_side(
        sampled(loader, len(train), args.updates),
        comparison.plain(model, adam),
        lambda parts: trainer(*parts[0]),
    )
    right = []
    for each in (model, ours):
        predicted = each.network(data.x, data.edge_index)[test].argmax(1)
        right.append(float((predicted == data.y[test]).float().mean()))
    print(f"{data.num_nodes} nodes, {data.num_edges} edges, {SEEDS} seeds")
    comparison.report(runs, "accuracy on test nodes", (right[0], right[1]))
    if args.plot:
        comparison.picture(args.plot, "Nodes of houses, GraphSAGE", runs)
    return runs


if __name__ == "__main__":
    main()
