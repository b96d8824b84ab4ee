"""Batches of one size: what is padded, what is trimmed, and what becomes of each attribute."""

import copy

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import poptorch
import poptorch_geometric as pg
from helpers import graphs as made
from poptorch_geometric.collate import CombinedBatchingCollater, FixedSizeCollater
from poptorch_geometric.common import DataBatch, HeteroDataBatch

GRAPHS = made.graphs()


# What is padded: two rings of 3 and 4 nodes, with as many edges, in a batch of 14 nodes, 16 edges
# and 4 graphs.


@pytest.fixture(params=[False, True], ids=["y of graphs", "y of nodes"])
def y_is_of_nodes(request: pytest.FixtureRequest) -> bool:
    """Whether the samples have a ``y`` for each node, or one for the graph."""
    return bool(request.param)


@pytest.fixture
def two_rings(y_is_of_nodes: bool) -> list[Data]:
    return [made.graph(3, 0, y_is_of_nodes), made.graph(4, 1, y_is_of_nodes)]


@pytest.fixture
def padded(two_rings: list[Data]) -> DataBatch:
    """The two rings, padded with -1 for nodes, -2 for edges and -3 for graphs."""
    sizes = made.sizes(14, 16, 4, node_pad_value=-1, edge_pad_value=-2, graph_pad_value=-3)
    return FixedSizeCollater(sizes, add_masks_to_batch=True)(two_rings)


@pytest.mark.spec("geometric", 34)
def test_a_batch_has_exactly_the_sizes_that_were_asked_for(padded: DataBatch) -> None:
    assert type(padded) is DataBatch
    assert padded.num_nodes == 14
    assert padded.num_edges == 16
    assert padded.num_graphs == 4


@pytest.mark.spec("geometric", 11)
def test_samples_come_first_and_unchanged(padded: DataBatch, two_rings: list[Data]) -> None:
    assert torch.equal(padded.x[:7], torch.cat([ring.x for ring in two_rings]))


@pytest.mark.spec("geometric", 12)
def test_padding_nodes_have_the_padding_value_in_the_attributes_own_type(
    padded: DataBatch,
) -> None:
    assert padded.x.dtype == torch.float32
    assert (padded.x[7:] == -1).all()
    assert padded.place.dtype == torch.int64
    assert (padded.place[7:] == -1).all()


@pytest.mark.spec("geometric", 13)
def test_padding_edges_have_the_padding_value(padded: DataBatch) -> None:
    assert (padded.edge_attr[7:] == -2).all()


@pytest.mark.spec("geometric", 14, 19)
def test_labels_are_padded_as_nodes_or_as_graphs(
    padded: DataBatch, two_rings: list[Data], y_is_of_nodes: bool
) -> None:
    real = torch.cat([ring.y for ring in two_rings])

    assert padded.y.shape == ((14,) if y_is_of_nodes else (4,))
    assert torch.equal(padded.y[: len(real)], real)
    assert (padded.y[len(real) :] == (-1 if y_is_of_nodes else -3)).all()


@pytest.mark.spec("geometric", 16)
def test_padding_edges_join_a_padding_node_with_itself(padded: DataBatch) -> None:
    """Padding graphs begin at the nodes 7 and 11; the 9 edges are shared out between them."""
    assert padded.edge_index[:, 7:].tolist() == [[7] * 5 + [11] * 4] * 2
    assert padded.edge_index.max() < 14


@pytest.mark.spec("geometric", 33)
def test_every_node_has_the_number_of_its_graph(padded: DataBatch) -> None:
    assert padded.batch.tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 3
    assert padded.ptr.tolist() == [0, 3, 7, 11, 14]


@pytest.mark.spec("geometric", 31)
@pytest.mark.parametrize("name, real", [("graphs_mask", 2), ("nodes_mask", 7), ("edges_mask", 7)])
def test_masks_are_true_for_real_elements(padded: DataBatch, name: str, real: int) -> None:
    mask = padded[name]

    assert mask.dtype == torch.bool
    assert mask.tolist() == [at < real for at in range(len(mask))]


@pytest.mark.spec("geometric", 15)
@pytest.mark.parametrize("name", ["train_mask", "val_mask", "test_mask"])
def test_padding_is_in_no_split_of_the_data(name: str) -> None:
    sample = made.graph(3)
    sample[name] = torch.ones(3).bool()

    batch = FixedSizeCollater(made.sizes(9, 9, 2, node_pad_value=1))([sample])

    assert batch[name].tolist() == [True] * 3 + [False] * 6


def test_any_other_mask_is_padded_with_the_padding_value() -> None:
    sample = made.graph(3)
    sample.other = torch.ones(3).bool()

    batch = FixedSizeCollater(made.sizes(9, 9, 2, node_pad_value=1))([sample])

    assert batch.other.tolist() == [True] * 9


@pytest.fixture
def described_graph() -> Data:
    """A graph with a text, a number and a list."""
    sample = made.graph(3)
    sample.name = "a"
    sample.number = 2
    sample.things = ["b", 1]
    return sample


@pytest.mark.spec("geometric", 17)
def test_padding_graphs_repeat_the_first_samples_text_numbers_and_lists(
    described_graph: Data,
) -> None:
    batch = FixedSizeCollater(made.sizes(9, 9, 2))([described_graph])

    assert batch.name == ["a", "a"]
    assert batch.number.tolist() == [2, 2]
    assert batch.things == [["b", 1], ["b", 1]]


@pytest.mark.spec("geometric", 18)
def test_defaults_for_padding_graphs_are_used_instead(described_graph: Data) -> None:
    sizes = made.sizes(9, 9, 2, pad_graph_defaults={"name": "pad", "number": 3})

    batch = FixedSizeCollater(sizes)([described_graph])

    assert batch.name == ["a", "pad"]
    assert batch.number.tolist() == [2, 3]


# Which attributes are of nodes, of edges and of graphs.


@pytest.mark.spec("geometric", 20)
def test_labels_of_another_length_are_refused() -> None:
    wrong = made.graph(3)
    wrong.y = torch.zeros(2)

    with pytest.raises(AssertionError, match="Incorrect input data"):
        FixedSizeCollater(made.sizes())([wrong])


def test_a_label_that_could_be_of_a_node_or_of_a_graph_is_of_the_graph() -> None:
    batch = FixedSizeCollater(made.sizes())([made.graph(1)])

    assert batch.y.shape == (4,)


def test_later_samples_show_that_labels_are_of_nodes() -> None:
    samples = [made.graph(1, of_nodes=True), made.graph(3, of_nodes=True)]

    batch = FixedSizeCollater(made.sizes())(samples)

    assert batch.y.shape == (14,)


@pytest.fixture
def graphs_with_one_edge_more_than_nodes() -> list[Data]:
    """A graph of 3 nodes and 4 edges, and one of 2 nodes and 3 edges."""
    samples = [made.graph(3), made.graph(2)]
    for sample in samples:
        sample.edge_index = torch.cat([sample.edge_index, sample.edge_index[:, :1]], dim=1)
        sample.edge_attr = torch.ones(sample.num_edges, 1)
    return samples


def test_an_attribute_with_as_many_entries_in_every_graph_is_of_graphs(
    graphs_with_one_edge_more_than_nodes: list[Data],
) -> None:
    """Three is the number of nodes of the first graph, and the number of edges of the second."""
    for sample in graphs_with_one_edge_more_than_nodes:
        sample.feature = torch.ones(3)

    batch = FixedSizeCollater(made.sizes(9, 12, 3))(graphs_with_one_edge_more_than_nodes)

    assert batch.feature.tolist() == [1] * 6 + [0] * 3


def test_an_attribute_with_as_many_entries_as_edges_is_of_edges(
    graphs_with_one_edge_more_than_nodes: list[Data],
) -> None:
    for sample in graphs_with_one_edge_more_than_nodes:
        sample.kind = torch.ones(sample.num_edges)

    batch = FixedSizeCollater(made.sizes(9, 12, 3))(graphs_with_one_edge_more_than_nodes)

    assert batch.kind.shape == (12,)


@pytest.mark.spec("geometric", 45)
def test_make_exclude_keys_lists_all_keys_but_those_given() -> None:
    keys = pg.make_exclude_keys(("x", "y"), GRAPHS[0])

    assert isinstance(keys, tuple)
    assert set(keys) == {"place", "edge_index", "edge_attr"}


@pytest.mark.spec("geometric", 21)
def test_follow_batch_adds_the_number_of_the_graph_of_every_entry() -> None:
    batch = FixedSizeCollater(made.sizes(), follow_batch=["x"])(GRAPHS[:2])

    assert torch.equal(batch.x_batch, batch.batch)


def test_excluded_keys_are_not_in_the_batch() -> None:
    batch = FixedSizeCollater(made.sizes(), exclude_keys=["edge_attr"])(GRAPHS[:2])

    assert "edge_attr" not in batch


# What is refused.


@pytest.mark.spec("geometric", 22)
def test_a_tuple_of_samples_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected list, got tuple"):
        FixedSizeCollater(made.sizes())(tuple(GRAPHS[:2]))


def test_samples_of_several_classes_are_refused() -> None:
    with pytest.raises(AssertionError, match="same class"):
        FixedSizeCollater(made.sizes())([GRAPHS[0], made.hetero()])


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="list of graphs of a batch is empty"):
        FixedSizeCollater(made.sizes())([])


def test_a_sample_that_lacks_an_attribute_is_named() -> None:
    lacking = made.graph(3)
    del lacking.edge_attr

    with pytest.raises(KeyError, match="graph 1 has no 'edge_attr'"):
        FixedSizeCollater(made.sizes())([GRAPHS[0], lacking])


@pytest.mark.parametrize("outside", [3, -1])
def test_an_edge_to_a_node_that_does_not_exist_is_refused(outside: int) -> None:
    wrong = made.graph(3)
    wrong.edge_index = torch.tensor([[0, 1, outside], [0, 1, 2]])

    with pytest.raises(poptorch.Error, match="An edge refers to a node that the graph does not"):
        FixedSizeCollater(made.sizes())([wrong])


def test_a_collater_works_after_it_has_refused_samples() -> None:
    collate = FixedSizeCollater(made.sizes())
    with pytest.raises(poptorch.Error):
        collate([])

    assert collate(GRAPHS[:2]).num_graphs == 4


def test_a_graph_may_have_no_nodes() -> None:
    batch = FixedSizeCollater(made.sizes())([made.graph(0), made.graph(3)])

    assert batch.ptr.tolist() == [0, 0, 3, 9, 14]


def test_a_graph_may_have_no_edges() -> None:
    alone = Data(x=torch.ones(3, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))

    assert FixedSizeCollater(made.sizes())([alone]).num_edges == 16


@pytest.mark.spec("geometric", 23, 24)
@pytest.mark.parametrize(
    "samples, sizes, phrase",
    [
        (GRAPHS[:3], (99, 99, 2), r"number of graphs\n.*3 samples \+ 1 padding graph"),
        (
            GRAPHS[:2],
            (4, 99, 3),
            "enough space for the number of nodes.*\n.*5 nodes; at most 4 fit",
        ),
        (GRAPHS[:2], (9, 4, 3), "enough space for the number of edges"),
        (GRAPHS[:2], (9, 9, 2), "cannot create additional graphs to pad nodes and edges"),
        (GRAPHS[:2], (5, 9, 3), "no padding node left"),
    ],
    ids=["graphs", "nodes", "edges", "padding graphs", "padding nodes"],
)
def test_samples_that_do_not_fit_are_an_error_with_a_remedy(
    samples: list[Data], sizes: tuple[int, int, int], phrase: str
) -> None:
    with pytest.raises(RuntimeError) as failure:
        FixedSizeCollater(made.sizes(*sizes))(samples)

    failure.match(phrase)
    failure.match("Fix:")


@pytest.mark.spec("geometric", 24)
def test_an_exactly_full_batch_needs_no_padding() -> None:
    batch = FixedSizeCollater(made.sizes(5, 5, 2), add_masks_to_batch=True)(GRAPHS[:2])

    assert batch.nodes_mask.all()
    assert batch.graphs_mask.all()


@pytest.mark.spec("geometric", 33)
def test_padding_graphs_may_have_no_nodes() -> None:
    batch = FixedSizeCollater(made.sizes(5, 5, 4), add_masks_to_batch=True)(GRAPHS[:2])

    assert batch.num_graphs == 4
    assert batch.ptr.tolist() == [0, 2, 5, 5, 5]


def test_only_padding_graphs_with_nodes_get_edges() -> None:
    batch = FixedSizeCollater(made.sizes(6, 9, 4))(GRAPHS[:2])

    assert batch.edge_index[:, 5:].tolist() == [[5] * 4] * 2


# Trimming.


@pytest.fixture(params=range(10), ids=lambda seed: f"seed {seed}")
def trimmed(request: pytest.FixtureRequest) -> DataBatch:
    """Rings of 9, 2 and 0 nodes trimmed to 4 nodes, with one for the edges of padding."""
    samples = [made.graph(9, 0), made.graph(2, 1), made.graph(0, 2)]
    torch.manual_seed(request.param)
    return FixedSizeCollater(made.sizes(5, 20, 4), True, trim_nodes=True)(samples)


@pytest.mark.spec("geometric", 25, 32)
def test_trimming_nodes_keeps_one_of_each_sample(trimmed: DataBatch) -> None:
    samples_with_nodes = {1.0, 2.0}

    assert trimmed.num_nodes == 5
    assert trimmed.nodes_mask.sum() == 4
    assert samples_with_nodes <= set(trimmed.x[:4, 0].tolist())


def test_trimming_nodes_keeps_their_order(trimmed: DataBatch) -> None:
    steps = trimmed.place[:4].diff()
    within_a_graph = trimmed.batch[:4].diff() == 0

    assert (steps[within_a_graph] > 0).all()


@pytest.mark.spec("geometric", 29)
def test_trimming_nodes_keeps_edges_between_those_that_remain(trimmed: DataBatch) -> None:
    """An edge of a ring leads to the next node."""
    nodes_of_ring = torch.tensor([9, 2, 0])
    real = trimmed.edge_index[:, trimmed.edges_mask]

    source, target = trimmed.place[real]

    assert (real < 4).all()
    assert torch.equal(target, (source + 1) % nodes_of_ring[trimmed.batch[real[0]]])


@pytest.mark.spec("geometric", 29)
def test_trimming_nodes_keeps_attributes_with_their_edges(trimmed: DataBatch) -> None:
    """Attributes of a graph's edges equal those of its nodes."""
    real = trimmed.edge_index[:, trimmed.edges_mask]

    assert torch.equal(trimmed.edge_attr[trimmed.edges_mask, 0], trimmed.x[real[0], 0])


@pytest.fixture
def seven_nodes() -> list[Data]:
    """Rings of 5 and 2 nodes."""
    return [made.graph(5, 0), made.graph(2, 1)]


@pytest.mark.spec("geometric", 26)
def test_trimming_edges_keeps_all_nodes_and_edges_of_each_graph(seven_nodes: list[Data]) -> None:
    batch = FixedSizeCollater(made.sizes(9, 4, 3), True, trim_edges=True)(seven_nodes)

    assert batch.edges_mask.tolist() == [True] * 4
    assert batch.nodes_mask.sum() == 7
    assert {1.0, 2.0} <= set(batch.edge_attr[:, 0].tolist())


@pytest.mark.spec("geometric", 27)
def test_trimming_nodes_and_edges_gives_exact_sizes(seven_nodes: list[Data]) -> None:
    collate = FixedSizeCollater(made.sizes(6, 2, 3), True, trim_nodes=True, trim_edges=True)

    batch = collate(seven_nodes)

    assert batch.num_nodes == 6
    assert batch.num_edges == 2
    assert batch.num_graphs == 3


@pytest.mark.spec("geometric", 28)
def test_trimming_leaves_no_graph_empty(seven_nodes: list[Data]) -> None:
    with pytest.raises(RuntimeError, match="would leave empty graphs"):
        FixedSizeCollater(made.sizes(1, 9, 3), trim_nodes=True)(seven_nodes)


@pytest.fixture
def trimming() -> FixedSizeCollater:
    return FixedSizeCollater(made.sizes(5, 9, 4), True, trim_nodes=True, trim_edges=True)


@pytest.fixture
def too_many_nodes() -> list[Data]:
    """45 nodes, where ``trimming`` has room for 5."""
    return [made.graph(40), *made.graphs(2)]


@pytest.mark.spec("geometric", 30)
def test_trimming_draws_new_numbers_each_time(
    trimming: FixedSizeCollater, too_many_nodes: list[Data]
) -> None:
    torch.manual_seed(3)

    first = trimming(too_many_nodes).place
    second = trimming(too_many_nodes).place

    assert not torch.equal(first, second)


@pytest.mark.spec("geometric", 30)
def test_trimming_follows_the_seed_of_torch(
    trimming: FixedSizeCollater, too_many_nodes: list[Data]
) -> None:
    torch.manual_seed(3)
    first = trimming(too_many_nodes).place
    torch.manual_seed(3)
    second = trimming(too_many_nodes).place

    assert torch.equal(second, first)


@pytest.mark.spec("geometric", 35)
def test_trimming_leaves_samples_as_they_are(
    trimming: FixedSizeCollater, too_many_nodes: list[Data]
) -> None:
    before = copy.deepcopy(too_many_nodes)

    trimming(too_many_nodes)

    assert len(too_many_nodes) == len(before)
    for now, then in zip(too_many_nodes, before, strict=True):
        assert made.same(now, then)


# Graphs with types.


@pytest.fixture(scope="module")
def two_typed_graphs() -> list[HeteroData]:
    return made.heteros(2)


@pytest.fixture(scope="module")
def typed_sizes() -> pg.FixedSizeOptions:
    """Plain numbers, which become numbers by type when they are first used."""
    return made.sizes(12, 14, 4, node_pad_value=-1)


@pytest.fixture(scope="module")
def typed(two_typed_graphs: list[HeteroData], typed_sizes: pg.FixedSizeOptions) -> HeteroDataBatch:
    """Two graphs with types, padded to 12 nodes and 14 edges of every type."""
    return FixedSizeCollater(typed_sizes, add_masks_to_batch=True)(two_typed_graphs)


@pytest.mark.spec("geometric", 39)
def test_plain_sizes_become_sizes_by_type_in_the_users_object(
    typed: HeteroDataBatch, typed_sizes: pg.FixedSizeOptions
) -> None:
    assert typed_sizes.num_nodes == {"v0": 12, "v1": 12}
    assert typed_sizes.num_edges == dict.fromkeys(made.EDGES, 14)


@pytest.mark.spec("geometric", 36)
def test_a_batch_with_types_has_the_sum_of_their_sizes(typed: HeteroDataBatch) -> None:
    assert type(typed) is HeteroDataBatch
    assert typed.num_nodes == 2 * 12
    assert typed.num_edges == 3 * 14
    assert typed.num_graphs == 4


@pytest.mark.spec("geometric", 37)
def test_the_mask_of_graphs_is_on_a_batch_with_types_itself(typed: HeteroDataBatch) -> None:
    assert typed.graphs_mask.tolist() == [True, True, False, False]


@pytest.mark.spec("geometric", 36, 37)
@pytest.mark.parametrize("kind", made.TYPES)
def test_nodes_of_each_type_are_padded_to_the_same_number(
    typed: HeteroDataBatch, two_typed_graphs: list[HeteroData], kind: str
) -> None:
    real = sum(graph[kind].num_nodes for graph in two_typed_graphs)

    store = typed[kind]

    assert store.num_nodes == 12
    assert store.ptr[-1] == 12
    assert store.nodes_mask.tolist() == [at < real for at in range(12)]
    assert (store.x[real:] == -1).all()


@pytest.mark.spec("geometric", 36, 37)
@pytest.mark.parametrize("kind", made.EDGES, ids=lambda kind: kind[1])
def test_padding_edges_of_each_type_join_padding_nodes(
    typed: HeteroDataBatch, kind: tuple[str, str, str]
) -> None:
    source, _, target = kind
    edges = typed[kind].edge_index
    padding = edges[:, ~typed[kind].edges_mask]

    assert edges.shape == (2, 14)
    assert edges.max() < 12
    assert (padding[0] >= typed[source].nodes_mask.sum()).all()
    assert (padding[1] >= typed[target].nodes_mask.sum()).all()


def test_labels_of_graphs_and_of_nodes_of_a_type_have_their_lengths(
    typed: HeteroDataBatch,
) -> None:
    assert typed.label.shape == (4,)
    assert typed["v0"].y.shape == (12,)


@pytest.fixture
def typed_and_trimmed() -> HeteroDataBatch:
    """11 nodes of v0, where 6 fit, and 7 of v1, where 30 fit."""
    sizes = pg.FixedSizeOptions({"v0": 6, "v1": 30}, dict.fromkeys(made.EDGES, 5), 3)
    samples = [made.hetero(9, 4, 0), made.hetero(2, 3, 1)]
    return FixedSizeCollater(sizes, True, trim_nodes=True, trim_edges=True)(samples)


def test_only_nodes_of_types_that_have_too_many_are_trimmed(
    typed_and_trimmed: HeteroDataBatch,
) -> None:
    assert typed_and_trimmed["v0"].nodes_mask.sum() <= 6
    assert typed_and_trimmed["v1"].nodes_mask.sum() == 7


@pytest.mark.parametrize("kind", made.EDGES, ids=lambda kind: kind[1])
def test_edges_that_remain_join_nodes_that_remain(
    typed_and_trimmed: HeteroDataBatch, kind: tuple[str, str, str]
) -> None:
    source, _, target = kind
    store = typed_and_trimmed[kind]

    sources, targets = store.edge_index[:, store.edges_mask]

    assert typed_and_trimmed[source].nodes_mask[sources].all()
    assert typed_and_trimmed[target].nodes_mask[targets].all()


@pytest.mark.spec("geometric", 38)
def test_a_type_of_nodes_without_a_size_is_named() -> None:
    sizes = pg.FixedSizeOptions({"v0": 9}, dict.fromkeys(made.EDGES, 9))

    with pytest.raises(AssertionError, match="'v1' exists in the data but not in the fixed size"):
        FixedSizeCollater(sizes)([made.hetero()])


@pytest.mark.spec("geometric", 38)
def test_a_type_of_edges_without_a_size_is_named() -> None:
    sizes = pg.FixedSizeOptions({"v0": 9, "v1": 9}, {made.EDGES[0]: 9})

    with pytest.raises(AssertionError, match=r"Edge type \('v1', 'e1', 'v0'\) exists"):
        FixedSizeCollater(sizes)([made.hetero()])


@pytest.fixture
def typed_without_features() -> HeteroData:
    """Three nodes of the type a, which have no features, and two of b with a text."""
    data = HeteroData()
    data["a"].num_nodes = 3
    data["b"].x = torch.ones(2, 1)
    data["b"].name = "text"
    data["a", "to", "b"].edge_index = torch.tensor([[2], [1]])
    return data


def test_a_type_without_features_is_padded_by_its_number_of_nodes(
    typed_without_features: HeteroData,
) -> None:
    batch = FixedSizeCollater(made.sizes(5, 4, 2))([typed_without_features])

    assert batch["a"].num_nodes == 5
    assert batch["b"].num_nodes == 5


def test_padding_repeats_the_text_of_a_type(typed_without_features: HeteroData) -> None:
    batch = FixedSizeCollater(made.sizes(5, 4, 2))([typed_without_features])

    assert batch["b"].name == ["text", "text"]


# Several micro-batches in one.


@pytest.fixture
def named_graphs() -> list[Data]:
    """Rings of 2, 3, 4 and 2 nodes, named by the number of their nodes."""
    graphs = made.graphs(4)
    for graph in graphs:
        graph.name = str(graph.num_nodes)
    return graphs


@pytest.fixture
def collate() -> FixedSizeCollater:
    """Collates two graphs into micro-batches of 9 nodes, 9 edges and 3 graphs."""
    return FixedSizeCollater(made.sizes(9, 9, 3), add_masks_to_batch=True)


@pytest.fixture
def combined(collate: FixedSizeCollater, named_graphs: list[Data]) -> Data:
    """Two micro-batches of two graphs each."""
    return CombinedBatchingCollater(collate, 2)(named_graphs)


@pytest.mark.spec("geometric", 40)
def test_without_a_size_of_groups_all_samples_are_one_group() -> None:
    whole = CombinedBatchingCollater(FixedSizeCollater(made.sizes(19, 19, 5)))(GRAPHS[:4])

    assert whole.x.shape == (19, 2)


@pytest.mark.spec("geometric", 41)
def test_samples_that_make_no_whole_groups_are_refused(collate: FixedSizeCollater) -> None:
    with pytest.raises(AssertionError, match="Invalid batch size"):
        CombinedBatchingCollater(collate, 2)(GRAPHS[:3])


@pytest.mark.spec("geometric", 42)
def test_edges_of_groups_are_pairs_of_rows_with_separate_node_numbers(
    combined: Data, collate: FixedSizeCollater, named_graphs: list[Data]
) -> None:
    first = collate(named_graphs[:2])
    second = collate(named_graphs[2:])

    assert combined.edge_index.shape == (2 * 2, 9)
    assert torch.equal(combined.edge_index, torch.cat([first.edge_index, second.edge_index]))


@pytest.mark.spec("geometric", 43)
def test_numbers_of_graphs_start_again_in_each_group(
    combined: Data, collate: FixedSizeCollater, named_graphs: list[Data]
) -> None:
    first = collate(named_graphs[:2])
    second = collate(named_graphs[2:])

    assert combined.batch.tolist() == [*first.batch.tolist(), *second.batch.tolist()]
    assert combined.ptr.tolist() == [0, 2, 5, 9, 0, 4, 6, 9]


@pytest.mark.spec("geometric", 40)
def test_attributes_of_graphs_are_concatenated_group_by_group(combined: Data) -> None:
    assert combined.graphs_mask.tolist() == [True, True, False] * 2
    assert combined.name == ["2", "3", "2", "4", "2", "4"]


@pytest.mark.spec("geometric", 44)
def test_numbers_of_a_combined_batch_are_those_of_one_micro_batch(combined: Data) -> None:
    assert combined.num_nodes == 9
    assert combined.num_edges == 9
    assert combined.num_graphs == 3


def test_a_combined_batch_cannot_be_divided_into_graphs(combined: Data) -> None:
    with pytest.raises(RuntimeError):
        combined.to_data_list()


def test_a_combined_batch_with_types_has_the_numbers_of_one_micro_batch() -> None:
    collate = FixedSizeCollater(made.sizes(9, 9, 3))

    batch = CombinedBatchingCollater(collate, 2)(made.heteros(4))

    assert batch.num_nodes == 2 * 9  # of two types
    assert batch.num_graphs == 3
    assert batch["v0"].x.shape == (2 * 9, 2)  # of two micro-batches
    assert batch[made.EDGES[0]].num_edges == 9


def test_any_function_of_a_list_can_be_the_collater_of_the_groups() -> None:
    assert CombinedBatchingCollater(list, 2)([1, 2, 3, 4]) == [1, 2, 3, 4]
