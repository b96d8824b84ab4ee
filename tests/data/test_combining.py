"""The batch arithmetic, and joining micro-batches to combined batches."""

import collections

import pytest
import torch

from helpers.data_sets import Graph, GraphParser, Pair
from poptorch._data.combining import Grouped, join
from poptorch.argparsers import registerCustomArgParser


def ones(rows, value=1.0):
    return torch.full((rows, 2), value)


def test_tensors_are_concatenated_leaf_by_leaf():
    joined = join([(ones(2), {"k": ones(1)}), (ones(3, 2.0), {"k": ones(1, 5.0)})])
    assert torch.equal(joined[0], torch.cat([ones(2), ones(3, 2.0)]))
    assert joined[1]["k"].tolist() == [[1, 1], [5, 5]]


def test_container_types_survive():
    joined = join([Pair(ones(1), ones(1)), Pair(ones(2), ones(2))])
    assert type(joined) is Pair
    assert joined.left.shape == (3, 2)
    ordered = join([collections.OrderedDict(b=ones(1), a=ones(1)) for _ in range(2)])
    assert type(ordered) is collections.OrderedDict
    assert list(ordered) == ["b", "a"]


def test_registered_types_are_joined_by_their_parser():
    registerCustomArgParser(Graph, GraphParser())
    try:
        joined = join([Graph(ones(1), ones(2), "first"), Graph(ones(1), ones(2), "last")])
    finally:
        registerCustomArgParser(Graph, None)
    assert (joined.nodes.shape, joined.edges.shape) == ((2, 2), (4, 2))
    assert joined.name == "last"


def test_texts_that_torch_collates_follow_one_another():
    collate = torch.utils.data.default_collate
    batches = [collate([(ones(1), "a"), (ones(1), "b")]), collate([(ones(1), "c"), (ones(1), "d")])]
    assert tuple(join(batches)[1]) == ("a", "b", "c", "d")


def test_texts_beside_tensors_follow_one_another():
    joined = join([(ones(2), ["a", "b"], "x", 1), (ones(1), ["c"], "y", 2)])
    assert joined[1:] == (["a", "b", "c"], "y", 2)


@pytest.mark.parametrize("drop_last, sizes", [(True, [2, 2]), (False, [2, 2, 1])])
def test_groups_of_batches(drop_last, sizes):
    batches = [torch.tensor([float(i)]) for i in range(5)]
    groups = list(Grouped(batches, 2, drop_last))
    assert [len(group) for group in groups] == sizes
    assert torch.cat(groups).tolist() == [0, 1, 2, 3, 4][: sum(sizes)]
