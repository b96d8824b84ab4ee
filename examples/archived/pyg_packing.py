"""Show the fourth tutorial about graphs: small graphs, as many in a batch as fit.

python examples/archived/pyg_packing.py
"""

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import poptorch
import poptorch_geometric as pg

GRAPHS = 12  # per batch, including one of padding


def ring() -> Data:
    """Return a ring of 3 to 11 nodes; its label says whether there are more than 6."""
    nodes = int(torch.randint(3, 12, ()))
    near = torch.arange(nodes)
    edges = torch.stack([near, (near + 1) % nodes])
    return Data(x=torch.ones(nodes, 1), edge_index=edges, y=torch.tensor([int(nodes > 6)]))


class GIN(torch.nn.Module):
    """Two layers and a pooling layer. Padding graphs are not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = pyg.GIN(1, 16, num_layers=2), torch.nn.Linear(16, 2)

    def forward(self, x, edge_index, batch, graphs_mask=None, y=None):
        x = self.head(pyg.global_add_pool(self.network(x, edge_index), batch, GRAPHS))
        if y is None:
            return x
        return x, torch.nn.functional.cross_entropy(x, torch.where(graphs_mask, y, -100))


def main() -> None:
    torch.manual_seed(0)
    samples = [ring() for _ in range(400)]
    sizes = pg.FixedSizeOptions(num_nodes=88, num_edges=88, num_graphs=GRAPHS)
    loaders = {
        strategy.name: pg.FixedSizeDataLoader(
            samples, batch_size=GRAPHS, fixed_size_options=sizes, fixed_size_strategy=strategy,
            over_size_strategy=pg.OverSizeStrategy.TrimNodesAndEdges,
        )
        for strategy in pg.FixedSizeStrategy
    }  # fmt: skip
    for name, loader in loaders.items():
        filled = [batch.nodes_mask.float().mean() for batch in loader]
        print(f"{name}: {len(filled)} batches, {torch.stack(filled).mean():.0%} of the nodes real")

    model = GIN()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.03)
    training_model = poptorch.trainingModel(model, optimizer=optimizer)
    losses = []
    for _ in range(6):
        for b in loaders["StreamPack"]:
            _, loss = training_model(b.x, b.edge_index, b.batch, b.graphs_mask, b.y)
            losses.append(loss.item())
    training_model.detachFromDevice()
    inference_model = poptorch.inferenceModel(model.eval())
    scores = inference_model(b.x, b.edge_index, b.batch)
    plain = model(b.x, b.edge_index, b.batch).detach()
    torch.testing.assert_close(scores[b.graphs_mask], plain[b.graphs_mask])
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
