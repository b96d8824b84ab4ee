"""Loaders with a batch sampler: every batch of indices is one micro-batch."""

import itertools
import logging
import random

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from helpers.cases import few
from helpers.data_sets import FORMS, Graph, GraphParser, Numbers, Structured
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


@pytest.mark.parametrize("form", FORMS)
def test_micro_batches_are_joined_as_one_batch_would_be_collated(form):
    data = Structured(12, form)
    got = list(loader(data, opts=options(3), batch_sampler=batches(12, 2)))
    expected = list(torch.utils.data.DataLoader(data, 6))
    assert str(got) == str(expected)
    assert type(got[0]) is type(expected[0])
    assert str(list(loader(data, 3))) == str(list(torch.utils.data.DataLoader(data, 3)))
    assert values(loader(Numbers(4), batch_sampler=batches(4, 2)))[0] == [0, 1]  # a single one


def record(samples):
    return torch.stack(samples), [f"sample {int(t)}" for t in samples], "a text", len(samples)


def test_texts_in_lists_follow_one_another_and_else_the_last_counts():
    sampler = batches(3, 2, False)
    made = loader(Numbers(3), opts=options(2), batch_sampler=sampler, collate_fn=record)
    ((tensor, *others),) = made
    assert tensor.tolist() == [0, 1, 2]
    assert others == [["sample 0", "sample 1", "sample 2"], "a text", 1]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_registered_types_are_joined(mode):
    registerCustomArgParser(Graph, GraphParser())
    try:
        made = loader(
            Numbers(8), opts=options(2), mode=mode, batch_sampler=batches(8, 2),
            collate_fn=Graph.collate,
        )  # fmt: skip
        got = [(type(g), g.nodes.tolist(), g.edges.tolist(), g.name) for g in made]
    finally:
        registerCustomArgParser(Graph, None)
    assert got == [(Graph, [*range(i, i + 4)], [*range(-i, -i - 4, -1)], "graph") for i in (0, 4)]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("drop_last, last", [(True, []), (False, [[8, 9]])])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_incomplete_groups(mode, drop_last, last):
    given = {"batch_sampler": batches(10, 2), "drop_last": drop_last}
    made = loader(Numbers(10), opts=options(2), mode=mode, **given)
    assert made.combinedBatchSize == 4
    assert len(made) == 2 + len(last)
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
    sampler, two = batches(8, 2), options(process=0, processes=2)
    for kwargs in ({"batch_size": 2}, {"shuffle": True}, {"batch_size": None}):
        with pytest.raises(Error, match="mutually exclusive with batch_size, shuffle"):
            loader(Numbers(8), batch_sampler=sampler, **kwargs)
    with pytest.raises(Error, match="mutually exclusive with auto_distributed_partitioning=True"):
        loader(Numbers(8), opts=two, batch_sampler=sampler)
    made = loader(Numbers(8), opts=two, batch_sampler=sampler, auto_distributed_partitioning=False)
    assert values(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def parts_of(size, combined, processes, drop_last):
    """Return the samples that each process reads, in the order without shuffling."""
    each, more = divmod(size, processes)
    ends = list(itertools.accumulate([0, *(each + (p < more) for p in range(processes))]))
    if drop_last:
        ends = [p * combined * (size // (combined * processes)) for p in range(processes + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def draw(rng):
    """Return counts and settings; sizes go up to some combined batches of all processes."""
    replicas, processes = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 3])
    group = rng.choice([group for group in (1, 2, 4) if replicas % group == 0])
    batch, iterations, accumulation = rng.randint(1, 4), rng.randint(1, 3), rng.choice([1, 1, 2])
    combined = batch * iterations * (replicas // group) * accumulation
    size = rng.randint(1, 4 * combined * processes + 2)
    settings = {
        "num_workers": rng.choice([0, 0, 1, 2]), "drop_last": rng.random() < 0.5,
        "shuffle": rng.random() < 0.5, "mode": rng.choice(list(DataLoaderMode)),
    }  # fmt: skip
    parts = parts_of(size, combined, processes, settings["drop_last"])
    if not all(parts):  # an asynchronous loader needs a first element
        settings["mode"] = DataLoaderMode.Sync
    if settings["mode"] is DataLoaderMode.AsyncRebatched:
        settings["rebatched_worker_size"] = min(rng.randint(1, 8), combined)
    return (iterations, replicas, accumulation, group), batch, size, combined, parts, settings


def check(case):
    counts, batch, size, combined, parts, settings = case
    read = [[], []]
    for process, part in enumerate(parts):
        opts = options(*counts, process=process, processes=len(parts), seed=size)
        made = loader(Numbers(size), batch, opts=opts, **settings)
        expected = [part[at : at + combined] for at in range(0, len(part), combined)]
        assert len(made) == len(expected)
        for samples in read:
            epoch = [each.tolist() for each in made]
            assert settings["shuffle"] or epoch == expected
            assert [len(each) for each in epoch] == [len(each) for each in expected]
            samples.extend(x for each in epoch for x in each)
        made.terminate()
    for samples in read:
        assert len(samples) == len(set(samples))
        assert set(samples) <= set(range(size))


@pytest.mark.slow
@pytest.mark.spec("data", 4, 12, 13, 14)
@pytest.mark.spec("parallel", 40)
@pytest.mark.parametrize("seed", few(range(5), 0, 2))
def test_every_sample_once(seed):
    rng = random.Random(seed)
    for _ in range(8):
        case = draw(rng)
        try:
            check(case)
        except BaseException as error:
            error.add_note(str(case))
            raise
