"""Loaders with a batch sampler: every batch of indices is one micro-batch."""

import logging

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from helpers.data_sets import Graph, GraphParser, Numbers, Structured, as_tuple, collate_graph
from helpers.loaders import ALL_MODES, loader, options, values
from poptorch._base.errors import Error
from poptorch.argparsers import registerCustomArgParser
from poptorch.enums import DataLoaderMode


class Backwards(Sampler):
    """Yields the indices from the last to the first, in batches of two, and has no length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        indices = list(range(self.size))[::-1]
        return (indices[i : i + 2] for i in range(0, self.size, 2))


def batches(size, batch_size, drop_last=True):
    return BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_micro_batches_are_joined_in_the_sampler_s_order(mode):
    made = loader(
        Structured(12, as_tuple), opts=options(3), mode=mode, batch_sampler=batches(12, 2)
    )
    assert made.combinedBatchSize == 6
    assert len(made) == 2
    for _ in range(2):
        got = [[t.tolist() for t in batch] for batch in made]
        assert got == [[list(b), [-x for x in b]] for b in (range(6), range(6, 12))]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_registered_types_are_joined(mode):
    registerCustomArgParser(Graph, GraphParser())
    try:
        made = loader(
            Numbers(8), opts=options(2), mode=mode, batch_sampler=batches(8, 2),
            collate_fn=collate_graph,
        )  # fmt: skip
        got = [(type(g), g.nodes.tolist(), g.name) for g in made]
    finally:
        registerCustomArgParser(Graph, None)
    assert got == [(Graph, [0, 1, 2, 3], "graph"), (Graph, [4, 5, 6, 7], "graph")]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("drop_last, last, length", [(True, [], 2), (False, [[8, 9]], 3)])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_incomplete_groups(mode, drop_last, last, length):
    made = loader(
        Numbers(10), opts=options(2), mode=mode, batch_sampler=batches(10, 2), drop_last=drop_last
    )
    assert len(made) == length
    for _ in range(2):
        assert values(made) == [[0, 1, 2, 3], [4, 5, 6, 7], *last]


@pytest.mark.spec("data", 17)
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_a_sampler_without_length_and_size(mode, caplog):
    made = loader(Numbers(8), opts=options(2), mode=mode, batch_sampler=Backwards(8))
    assert values(made) == [[7, 6, 5, 4], [3, 2, 1, 0]]
    assert made.combinedBatchSize == 2  # one sample per micro-batch, as far as is known
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(made)
    assert caplog.text == ""
    loader(Numbers(8), opts=options(2), batch_sampler=Backwards(8), drop_last=False)
    assert "the last tensor may be incomplete" in caplog.text


def test_sizes_that_do_not_divide_are_told(caplog):
    caplog.set_level(logging.INFO)
    loader(Numbers(10), opts=options(2), batch_sampler=batches(10, 2), drop_last=False)
    assert caplog.records[0].levelname == "WARNING"
    assert "yields 5 micro-batches, one call takes 2" in caplog.text
    caplog.clear()
    loader(Numbers(8), opts=options(2), batch_sampler=batches(8, 2), drop_last=False)
    assert caplog.text == ""


def test_what_a_batch_sampler_excludes():
    sampler = batches(8, 2)
    for kwargs in ({"batch_size": 2}, {"shuffle": True}, {"batch_size": None}):
        with pytest.raises(Error, match="mutually exclusive with batch_size, shuffle"):
            loader(Numbers(8), batch_sampler=sampler, **kwargs)
    two = options(process=0, processes=2)
    exclusive = "mutually exclusive with auto_distributed_partitioning=True"
    with pytest.raises(Error, match=exclusive):
        loader(Numbers(8), opts=two, batch_sampler=sampler)
    made = loader(Numbers(8), opts=two, batch_sampler=sampler, auto_distributed_partitioning=False)
    assert values(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_tensors_of_one_micro_batch_pass_unchanged():
    made = loader(Numbers(4), batch_sampler=batches(4, 2))
    assert torch.equal(next(iter(made)), torch.tensor([0.0, 1.0]))
