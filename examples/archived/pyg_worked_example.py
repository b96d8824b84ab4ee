"""Show the second tutorial about graphs: a graph convolutional network that classifies nodes.

python examples/archived/pyg_worked_example.py
"""

import copy

import torch
import torch_geometric.nn as pyg
from torch_geometric.datasets import KarateClub

import poptorch
from poptorch_geometric.dataloader import DataLoader


class GCN(torch.nn.Module):
    """Two convolutions. Returns the loss of the nodes with known classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = pyg.GCNConv(34, 16), pyg.GCNConv(16, 4)

    def forward(self, x, edge_index, y=None, train_mask=None):
        x = self.conv_2(self.conv_1(x, edge_index).relu(), edge_index).log_softmax(1)
        if y is None:
            return x
        return x, torch.nn.functional.nll_loss(x, torch.where(train_mask, y, -100))


def main() -> None:
    torch.manual_seed(0)
    data = KarateClub()[0]  # this data set is part of torch_geometric
    loader = DataLoader([data], batch_size=1)
    model = GCN()
    plain = copy.deepcopy(model)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.05)
    training_model = poptorch.trainingModel(model, optimizer=optimizer)
    losses = []
    for _ in range(50):
        for batch in loader:
            _, loss = training_model(batch.x, batch.edge_index, batch.y, batch.train_mask)
            losses.append(loss.item())
    training_model.detachFromDevice()

    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        _, plain_loss = plain(data.x, data.edge_index, data.y, data.train_mask)
        plain_loss.backward()
        optimizer.step()
    torch.testing.assert_close(loss, plain_loss.detach(), rtol=1e-3, atol=1e-4)
    inference_model = poptorch.inferenceModel(model.eval())
    right = inference_model(data.x, data.edge_index).argmax(1) == data.y
    print(f"loss {losses[0]:.2f} to {losses[-1]:.4f}, {right.float().mean():.0%} are right")
    assert right.float().mean() > 0.6


if __name__ == "__main__":
    main()
