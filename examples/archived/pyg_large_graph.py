"""Show the fifth tutorial about graphs: one large graph, by clusters and by sampled neighbourhoods.

python examples/archived/pyg_large_graph.py
"""

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.loader import ClusterLoader

import poptorch
import poptorch_geometric as pg
from poptorch_geometric.cluster_loader import ClusterData, FixedSizeClusterLoader
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader

NODES, SEEDS = 400, 20


def large_graph() -> Data:
    """Return a random graph in which neighbours mostly have the same class."""
    kinds = torch.randint(4, (NODES,))
    edges = torch.randint(NODES, (2, 12_000))
    alike = kinds[edges[0]] == kinds[edges[1]]
    x = torch.randn(NODES, 8) + 0.7 * torch.nn.functional.one_hot(kinds, 8)
    mask = torch.rand(NODES) < 0.5
    return Data(x=x, edge_index=edges[:, alike], y=kinds, train_mask=mask)


class Net(torch.nn.Module):
    """GraphSAGE. Nodes outside of the mask are not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = pyg.GraphSAGE(8, 16, num_layers=2, out_channels=4)

    def forward(self, x, edge_index, y, mask):
        x = self.network(x, edge_index)
        return x, torch.nn.functional.cross_entropy(x, torch.where(mask, y, -100))


def train(loader, seeds: int | None, data: Data) -> float:
    """Train on a loader's batches. Return the accuracy on all nodes of the graph."""
    torch.manual_seed(1)
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training_model = poptorch.trainingModel(model, optimizer=optimizer)
    for _ in range(30):
        for batch in loader:
            mask = batch.train_mask
            if seeds:
                mask = mask & (torch.arange(len(mask)) < seeds)
            training_model(batch.x, batch.edge_index, batch.y, mask)
    training_model.detachFromDevice()
    model.eval()
    return (model.network(data.x, data.edge_index).argmax(1) == data.y).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    data = large_graph()
    over = pg.OverSizeStrategy.TrimNodesAndEdges
    clusters = ClusterData(data, num_parts=8, log=False)
    sizes = pg.FixedSizeOptions.from_loader(ClusterLoader(clusters, batch_size=2), sample_limit=8)
    by_clusters = FixedSizeClusterLoader(clusters, sizes, batch_size=2, over_size_strategy=over)
    neighbours = {"num_neighbors": [4, 4], "batch_size": SEEDS, "over_size_strategy": over}
    sizes = pg.FixedSizeOptions(num_nodes=250, num_edges=500)
    by_neighbours = FixedSizeNeighborLoader(
        data, shuffle=True, fixed_size_options=sizes, **neighbours
    )
    for name, loader, seeds in (
        ("clusters", by_clusters, None),
        ("neighbours", by_neighbours, SEEDS),
    ):
        right = train(loader, seeds, data)
        print(f"{name}: {right:.0%} of the nodes are right")
        assert right > 0.8


if __name__ == "__main__":
    main()
