"""Graphs as arguments and results of wrapped models."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.data.storage import BaseStorage

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from helpers.wrapping import Calling, infer, unchecked


def graphs_of_each_class() -> list[Data | HeteroData]:
    """A graph and a batch of two, each without types and with types."""
    typed = made.hetero()
    typed.name = "text"
    return [
        made.graph(3),
        Batch.from_data_list(made.graphs(2)),
        typed,
        Batch.from_data_list(made.heteros(2)),
    ]


of_each_class = pytest.mark.parametrize(
    "data", graphs_of_each_class(), ids=lambda data: type(data).__name__
)


def nodes(data: Data | HeteroData) -> BaseStorage | Data:
    """Where the features of (the first type of) nodes are."""
    return data["v0"] if isinstance(data, HeteroData) else data


def taken_apart_and_put_together(data: Data | HeteroData) -> Data | HeteroData:
    """The graph that the parser makes of copies of a graph's tensors."""
    parser = pg.PyGArgsParser()
    copies = [tensor.clone() for tensor in parser.yieldTensors(data)]
    return parser.reconstruct(data, iter(copies))


@of_each_class
def test_a_graph_is_divided_into_tensors(data: Data | HeteroData) -> None:
    tensors = list(pg.PyGArgsParser().yieldTensors(data))

    assert tensors
    assert {type(tensor) for tensor in tensors} == {torch.Tensor}


@pytest.mark.spec("geometric", 79)
@of_each_class
def test_a_graph_put_together_again_is_equal_and_another_object(data: Data | HeteroData) -> None:
    data.text = "text"

    rebuilt = taken_apart_and_put_together(data)

    assert rebuilt is not data
    assert type(rebuilt) is type(data)
    assert made.same(rebuilt, data)
    assert rebuilt.text == "text"
    if isinstance(data, Batch):
        assert rebuilt.num_graphs == data.num_graphs
        assert rebuilt.num_nodes == data.num_nodes


class Scaling:
    """Adds features ``h`` to a graph's nodes: the factor times ``x``. Counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, factor: torch.Tensor, data: Data | HeteroData) -> Data | HeteroData:
        self.runs += 1
        nodes(data).h = nodes(data).x * factor
        return data


@pytest.mark.spec("geometric", 76, 78)
@of_each_class
def test_a_wrapped_model_takes_graphs_and_compiles_once_for_one_shape(
    data: Data | HeteroData,
) -> None:
    scaling = Scaling()
    model = poptorch.inferenceModel(Calling(scaling), unchecked())

    for factor in (3.0, 2.0):
        out = model(torch.tensor([factor]), data)
        assert torch.equal(nodes(out).h, factor * nodes(data).x)

    assert scaling.runs == 1


@pytest.mark.spec("geometric", 77)
@of_each_class
def test_a_returned_graph_has_its_class_its_keys_and_new_ones(data: Data | HeteroData) -> None:
    before = {key: shape for key, (shape, _) in made.shapes(data).items()}

    out = infer(Scaling(), torch.tensor([3.0]), data, opts=unchecked())

    after = {key: shape for key, (shape, _) in made.shapes(out).items()}
    assert type(out) is type(data)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


@pytest.mark.spec("geometric", 78)
@of_each_class
def test_a_graph_of_another_shape_is_refused(data: Data | HeteroData) -> None:
    model = poptorch.inferenceModel(Calling(Scaling()), unchecked().programs(1))
    model(torch.tensor([3.0]), data)
    smaller = taken_apart_and_put_together(data)
    nodes(smaller).x = nodes(smaller).x[1:]

    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        model(torch.tensor([2.0]), smaller)


def sizes_of_tensors(data: Data | HeteroData | TemporalData) -> list[int]:
    return [tensor.numel() for tensor in pg.PyGArgsParser().yieldTensors(data)]


def test_tensors_of_a_graph_come_in_alphabetical_order() -> None:
    data = Data(y=torch.ones(1), edge_index=torch.zeros(2, 3), x=torch.ones(4))

    assert sizes_of_tensors(data) == [6, 4, 1]  # edge_index, x, y


def test_tensors_of_a_graph_with_types_come_as_they_were_set() -> None:
    typed = HeteroData()
    typed["b"].x = torch.ones(1)
    typed["a"].z = torch.ones(2)
    typed["a"].x = torch.ones(3)
    typed["a", "b"].edge_index = torch.zeros(2, 2)
    typed.label = torch.ones(5)

    # The graph's own (label), then those of nodes (x of b, z and x of a), then those of edges.
    assert sizes_of_tensors(typed) == [5, 1, 2, 3, 4]


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="Unsupported data type"):
        sizes_of_tensors(TemporalData(src=torch.zeros(2)))


def test_combined_batches_are_cut_into_micro_batches() -> None:
    seen: list[dict[str, object]] = []

    def sum_by_graph(batch: Data) -> torch.Tensor:
        seen.append(
            {
                "nodes": batch.num_nodes,
                "graphs": batch.num_graphs,
                "edges": tuple(batch.edge_index.shape),
            }
        )
        return batch.x.new_zeros(4).index_add(0, batch.batch, batch.x[:, 0])

    opts = unchecked(iterations=2).outputMode(poptorch.OutputMode.All)
    (batch,) = pg.FixedSizeDataLoader(made.graphs(6), 4, options=opts)

    out = infer(sum_by_graph, batch, opts=opts)

    assert seen == [{"nodes": 13, "graphs": 4, "edges": (2, 13)}]
    # Graph number n has 2, 3, 4, 2, 3, 4 nodes, each with the feature n + 1; a zero is padding.
    assert out.tolist() == [2 * 1, 3 * 2, 4 * 3, 0, 2 * 4, 3 * 5, 4 * 6, 0]
