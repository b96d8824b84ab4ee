"""Models of PyTorch Geometric train on padded batches as on the graphs themselves."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.closeness import near
from helpers.wrapping import options, training


class Network(torch.nn.Module):
    """An isomorphism layer, an attention layer, and a mean over each graph; returns its loss.

    Args:
        graphs: how many graphs a batch has, with those of padding.
    """

    def __init__(self, graphs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = pyg.GINConv(pyg.MLP([2, 8, 8], norm=None))
        self.attention = pyg.GATConv(8, 4, heads=2)
        self.head = torch.nn.Linear(8, 1)
        self.graphs = graphs

    def forward(self, batch: Data) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.convolution(batch.x, batch.edge_index).relu()
        x = self.attention(x, batch.edge_index).relu()
        out = self.head(pyg.global_mean_pool(x, batch.batch, self.graphs))[:, 0]
        error = torch.where(batch.graphs_mask, (out - batch.y).square(), 0.0)
        return out, poptorch.identity_loss(error.sum() / sum(batch.graphs_mask), "none")


def eager_step(model: Network, optimizer: torch.optim.Optimizer, samples: list[Data]) -> Any:
    """Make a step in eager PyTorch on bare graphs, three a micro-batch; return the last loss."""
    micro_batches = [samples[at : at + 3] for at in range(0, len(samples), 3)]
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        batch = Batch.from_data_list(micro_batch)
        batch.graphs_mask = torch.ones(3, dtype=torch.bool)
        _, loss = model(batch)
        (loss / len(micro_batches)).backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.slow
@pytest.mark.spec("geometric", 81)
def test_training_on_padded_batches_is_training_on_the_graphs() -> None:
    samples = made.molecules(9)
    opts = options(accumulation=3)
    model = Network(graphs=4)  # three and one of padding
    eager = Network(graphs=3)
    trainer = training(model, opts, lr=0.01)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    (batch,) = pg.FixedSizeDataLoader(samples, 4, options=opts)

    for _ in range(3):
        _, loss = trainer(batch)
        expected = eager_step(eager, optimizer, samples)
        torch.testing.assert_close(loss, expected, **near(24, 3))

    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(24, 3))


Metadata = tuple[list[str], list[tuple[str, str, str]]]


def hetero_conv(metadata: Metadata) -> torch.nn.Module:
    _, edge_types = metadata
    return pyg.HeteroConv({kind: pyg.SAGEConv((-1, -1), 5) for kind in edge_types}, "sum")


def attention(name: str) -> Callable[[Metadata], torch.nn.Module]:
    return lambda metadata: getattr(pyg, name)({"v0": 2, "v1": 3}, 6, metadata, heads=2)


def to_hetero(metadata: Metadata) -> torch.nn.Module:
    return pyg.to_hetero(pyg.GraphSAGE((-1, -1), 5, 2, 3), metadata)


@pytest.mark.slow
@pytest.mark.spec("geometric", 90)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(hetero_conv, id="HeteroConv", marks=pytest.mark.long),
        pytest.param(attention("HANConv"), id="HANConv", marks=pytest.mark.long),
        pytest.param(attention("HGTConv"), id="HGTConv"),
        pytest.param(to_hetero, id="to_hetero"),
    ],
)
def test_models_take_and_return_dictionaries_by_type(
    make: Callable[[Metadata], torch.nn.Module],
) -> None:
    data = made.hetero_graph()
    torch.manual_seed(0)
    model = make(data.metadata())
    inputs = (data.x_dict, data.edge_index_dict)
    expected = model(*inputs)  # this makes lazy weights, too

    out = poptorch.inferenceModel(copy.deepcopy(model), options())(*inputs)

    assert list(out) == list(expected)
    for kind in out:
        torch.testing.assert_close(out[kind], expected[kind].detach(), **near(24, 3))
