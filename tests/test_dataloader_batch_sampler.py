"""Batch samplers, processes and every sample once: how a loader divides its data."""

import itertools
import logging
import random

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, TensorDataset

from helpers.cases import few
from helpers.data_sets import FORMS, Counted, Graph, GraphParser, Numbers, Stream, Structured
from helpers.loaders import ALL_MODES, loader, options, values
from helpers.patience import eventually
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


def of_each_process(processes, dataset, batch_size, seed=None, iterations=1, **kwargs):
    def made(process):
        own = options(iterations, process=process, processes=processes, seed=seed)
        return loader(dataset, batch_size, opts=own, **kwargs)

    return [made(process) for process in range(processes)]


def flat(batches):
    return [x for batch in values(batches) for x in batch]


@pytest.mark.spec("data", 4)
def test_last_batches_are_told(caplog):
    loaders = of_each_process(3, Numbers(53), 4, drop_last=False)
    assert [len(made.dataset) for made in loaders] == [18, 18, 17]
    assert "combined batch size (4) x 3 processes" in caplog.text
    for rest in (2, 1):
        assert f"the last batch of this process has {rest} samples" in caplog.text


def test_every_process_reads_everything_without_partitioning():
    loaders = of_each_process(2, Numbers(6), 3, auto_distributed_partitioning=False)
    assert [values(made) for made in loaders] == [[[0, 1, 2], [3, 4, 5]]] * 2
    streams = of_each_process(2, Stream(6), 3, auto_distributed_partitioning=False)
    assert [values(made) for made in streams] == [[[0, 1, 2], [3, 4, 5]]] * 2


def test_processes_that_share_the_stages_read_the_same():
    def made(process, seed=5):
        own = options(1, process=process, processes=4, seed=seed)
        own.Distributed.stageProcesses(2)
        torch.manual_seed(process)
        return loader(Numbers(12), 3, opts=own, shuffle=True)

    first, second, third, fourth = (flat(made(process)) for process in range(4))
    assert first == second != third == fourth
    assert sorted(first + third) == list(range(12))


@pytest.mark.spec("parallel", 39)
def test_what_cannot_be_partitioned():
    with pytest.raises(AssertionError, match="batch_size=None not allowed"):
        of_each_process(2, Numbers(6), None, drop_last=False)
    with pytest.raises(AssertionError, match="not supported for IterableDataset"):
        of_each_process(2, Stream(6), 2)
    with pytest.raises(AssertionError, match=r"must set poptorch.Options.randomSeed\(\)"):
        of_each_process(2, Numbers(6), 2, shuffle=True)


@pytest.mark.spec("data", 15)
@pytest.mark.parametrize("mode, workers, persistent", [
    (DataLoaderMode.Sync, 0, None), (DataLoaderMode.Sync, 1, False), (ALL_MODES[1], 2, None),
])  # fmt: skip
def test_one_permutation_for_all_processes_and_a_new_one_every_epoch(mode, workers, persistent):
    loaders = of_each_process(
        2, Numbers(23), 2, seed=5, shuffle=True, mode=mode, num_workers=workers,
        persistent_workers=persistent,
    )  # fmt: skip
    epochs = [[x for made in loaders for x in flat(made)] for _ in range(4)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 20
    assert len({tuple(epoch) for epoch in epochs}) == 4
    for first, second in ((0, 1), (2, 3)):
        assert {*epochs[first], *epochs[second]} == set(range(23))
    again = of_each_process(2, Numbers(23), 2, seed=5, shuffle=True)
    assert [x for made in again for x in flat(made)] == epochs[0]
    other = of_each_process(2, Numbers(23), 2, seed=6, shuffle=True)
    assert [x for made in other for x in flat(made)] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterations_at_once_have_their_own_permutations(workers):
    (made, _) = of_each_process(2, Numbers(20), 2, seed=1, shuffle=True, num_workers=workers)
    (same, _) = of_each_process(2, Numbers(20), 2, seed=1, shuffle=True)
    expected = [flat(same), flat(same), flat(same)]
    first, second = iter(made), iter(made)
    got = [[], []]
    for a, b in zip(first, second, strict=True):
        got[0] += a.tolist()
        got[1] += b.tolist()
    assert got == expected[:2]
    del first, second
    assert flat(made) == expected[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_loaded_ahead_when_an_iteration_is_given_up_changes_no_permutation(workers):
    """How far ahead it is differs between processes, and their parts would overlap."""
    data = Counted(23)
    (ahead, _) = of_each_process(
        2, data, 5, seed=1, shuffle=True, mode=DataLoaderMode.Async, num_workers=workers,
        async_options={"buffer_size": 6},
    )  # fmt: skip
    (same, _) = of_each_process(2, Numbers(23), 5, seed=1, shuffle=True)
    expected = [flat(same) for _ in range(3)]
    assert next(iter(ahead)).tolist() == expected[0][:5]
    assert eventually(lambda: data.count >= 6 * 5)  # three iterations
    assert [flat(ahead), flat(ahead)] == expected[1:]
    ahead.terminate()


def test_tensor_data_sets_take_the_short_way_with_the_same_result():
    numbers = torch.arange(20.0)
    for shuffle in (False, True):
        short = of_each_process(2, TensorDataset(numbers), 2, seed=1, shuffle=shuffle)
        long = of_each_process(2, Numbers(20), 2, seed=1, shuffle=shuffle)
        for a, b in zip(short, long, strict=True):
            for _ in range(3):
                assert [batch[0].tolist() for batch in a] == values(b)
