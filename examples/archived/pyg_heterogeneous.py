"""Show the sixth tutorial about graphs: nodes and edges of several types.

python examples/archived/pyg_heterogeneous.py
"""

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import HeteroData

import poptorch
import poptorch_geometric as pg
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader

FILMS, ACTORS, SEEDS = 300, 100, 20


def films() -> HeteroData:
    """Return films and actors. The genre of a film follows from its actors."""
    data = HeteroData()
    likes = torch.randint(3, (ACTORS,))
    genre = torch.randint(3, (FILMS,))
    pairs = torch.stack([torch.randint(ACTORS, (4000,)), torch.randint(FILMS, (4000,))])
    pairs = pairs[:, likes[pairs[0]] == genre[pairs[1]]]
    data["film"].x, data["film"].y = torch.randn(FILMS, 4), genre
    data["actor"].x = torch.nn.functional.one_hot(likes, 3).float() + 0.5 * torch.randn(ACTORS, 3)
    data["actor", "plays", "film"].edge_index = pairs
    data["film", "with", "actor"].edge_index = pairs.flip(0)
    return data


class Model(torch.nn.Module):
    """GraphSAGE for each type of edge. The loss is that of the seeds."""

    def __init__(self, metadata) -> None:
        super().__init__()
        network = pyg.GraphSAGE((-1, -1), 16, num_layers=2, out_channels=3)
        self.network = pyg.to_hetero(network, metadata)

    def forward(self, x_dict, edge_index_dict, y=None):
        x = self.network(x_dict, edge_index_dict)["film"]
        if y is None:
            return x
        return x, torch.nn.functional.cross_entropy(x[:SEEDS], y[:SEEDS])


def main() -> None:
    torch.manual_seed(0)
    data = films()
    arguments = {
        "num_neighbors": [5, 5], "input_nodes": ("film", None), "batch_size": SEEDS,
        "over_size_strategy": pg.OverSizeStrategy.TrimNodesAndEdges,
    }  # fmt: skip
    sizes = pg.FixedSizeOptions(
        num_nodes={"film": 150, "actor": 100},
        num_edges={("actor", "plays", "film"): 800, ("film", "with", "actor"): 500},
    )
    loader = FixedSizeNeighborLoader(data, shuffle=True, fixed_size_options=sizes, **arguments)
    model = Model(data.metadata())
    model(data.x_dict, data.edge_index_dict)  # creates the lazy weights
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training_model = poptorch.trainingModel(model, optimizer=optimizer)
    losses = []
    for _ in range(5):
        for batch in loader:
            _, loss = training_model(batch.x_dict, batch.edge_index_dict, batch["film"].y)
            losses.append(loss.item())
    training_model.detachFromDevice()

    inference_model = poptorch.inferenceModel(model.eval())
    scores = inference_model(data.x_dict, data.edge_index_dict)
    plain = model(data.x_dict, data.edge_index_dict).detach()
    torch.testing.assert_close(scores, plain, rtol=1e-4, atol=1e-4)
    right = (scores.argmax(1) == data["film"].y).float().mean()
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, {right:.0%} of the films are right")
    assert right > 0.8


if __name__ == "__main__":
    main()
