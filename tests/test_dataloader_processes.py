"""Loaders of several processes: disjoint parts, common permutations. Each process is simulated."""

import pytest
import torch
from torch.utils.data import TensorDataset

from helpers.data_sets import Counted, Numbers, Stream
from helpers.loaders import ALL_MODES, loader, options, values
from helpers.patience import eventually
from poptorch.enums import DataLoaderMode


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
