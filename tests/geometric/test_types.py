"""Graphs as arguments and results of wrapped models."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import Calling, infer, options


def several() -> list:
    typed = made.hetero()
    typed.name = "text"
    return [
        made.graph(3), Batch.from_data_list(made.graphs(2)), typed,
        Batch.from_data_list(made.heteros(2)),
    ]  # fmt: skip


@pytest.mark.spec("geometric", 76, 77, 78, 79)
@pytest.mark.parametrize("data", several(), ids=lambda data: type(data).__name__)
def test_graphs_are_taken_apart_and_put_together_as_arguments_and_results(data) -> None:
    def nodes(data):
        return data["v0"] if isinstance(data, HeteroData) else data

    captured = []

    def forward(factor, data):
        captured.append(data)
        nodes(data).h = nodes(data).x * factor
        return data

    data.text = "text"
    parser = pg.PyGArgsParser()
    tensors = list(parser.yieldTensors(data))
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    again = parser.reconstruct(data, iter([tensor.clone() for tensor in tensors]))
    assert again is not data
    assert made.same(again, data)
    assert again.text == "text"
    if isinstance(data, Batch):
        assert (again.num_graphs, again.num_nodes) == (data.num_graphs, data.num_nodes)
    before = {key: shape for key, (shape, _) in made.shapes(data).items()}
    model = poptorch.inferenceModel(Calling(forward), options())
    for factor in (3.0, 2.0):
        out = model(torch.tensor([factor]), data)
        assert torch.equal(nodes(out).h, factor * nodes(data).x)
    assert len(captured) == 1
    assert type(out) is type(again) is type(data)
    after = {key: shape for key, (shape, _) in made.shapes(out).items()}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1
    nodes(again).x = nodes(again).x[1:]
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(torch.tensor([2.0]), again)


def test_tensors_come_in_a_fixed_order() -> None:
    parser = pg.PyGArgsParser()
    data = Data(y=torch.tensor([1]), edge_index=torch.zeros(2, 3), x=torch.ones(4))
    assert [t.numel() for t in parser.yieldTensors(data)] == [6, 4, 1]
    typed = HeteroData()
    typed["b"].x, typed["a"].z, typed["a"].x = torch.ones(1), torch.ones(2), torch.ones(3)
    typed["a", "b"].edge_index = torch.zeros(2, 2)
    typed.label = torch.ones(5)
    assert [t.numel() for t in parser.yieldTensors(typed)] == [5, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="Unsupported data type"):
        list(parser.yieldTensors(TemporalData(src=torch.zeros(2))))


def test_combined_batches_are_cut_into_micro_batches() -> None:
    seen = []

    def forward(batch):
        seen.append((batch.num_nodes, batch.num_graphs, tuple(batch.edge_index.shape)))
        return batch.x.new_zeros(4).index_add(0, batch.batch, batch.x[:, 0])

    opts = options(iterations=2).outputMode(poptorch.OutputMode.All)
    (batch,) = pg.FixedSizeDataLoader(made.graphs(6), 4, options=opts)
    out = infer(forward, batch, opts=opts)
    assert seen == [(13, 4, (2, 13))]
    assert out.tolist() == [2, 6, 12, 0, 8, 15, 24, 0]
