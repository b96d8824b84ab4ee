"""Which samples a process reads, and in which order."""

import pickle
import random

import pytest
import torch

from helpers.data_sets import Numbers
from poptorch._data.sharding import Shard, permutation, shard_range


def ranges(samples, combined, drop_last, processes):
    return [shard_range(samples, combined, drop_last, p, processes) for p in range(processes)]


def test_shards_over_random_sizes():
    rng = random.Random(1)
    for _ in range(300):
        samples, combined = rng.randrange(100), rng.randrange(1, 9)
        processes, drop_last = rng.randrange(1, 6), rng.random() < 0.5
        parts = ranges(samples, combined, drop_last, processes)
        read = [index for part in parts for index in part]
        if drop_last:
            whole = combined * (samples // (combined * processes))
            assert all(len(part) == whole for part in parts)
            assert read == list(range(whole * processes))
        else:
            assert read == list(range(samples))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_is_a_sequence_of_its_own_samples():
    shard = Shard(Numbers(10), range(3, 7))
    assert len(shard) == 4
    assert [shard[i].item() for i in range(4)] == [3, 4, 5, 6]
    assert shard[-1].item() == 6
    for index in (4, -5):
        with pytest.raises(IndexError, match="shard of 4 samples"):
            shard[index]
    assert [t.item() for t in shard.__getitems__([2, 0])] == [5, 3]
    assert [t.item() for t in list(shard)] == [3, 4, 5, 6]


def test_a_shard_uses_batched_reading_and_attributes_of_its_data_set():
    class Batched(Numbers):
        classes = ("cat", "dog")

        def __getitems__(self, indices):
            return [torch.tensor(float(-i)) for i in indices]

    shard = Shard(Batched(10), range(3, 7))
    assert [t.item() for t in shard.__getitems__([0, 1])] == [-3, -4]
    assert shard.classes == ("cat", "dog")
    with pytest.raises(AttributeError):
        _ = shard.unknown
    assert pickle.loads(pickle.dumps(Shard(Numbers(9), range(1, 3))))[0].item() == 1


def test_a_shard_reads_through_a_permutation():
    shard = Shard(Numbers(6), range(2, 5), torch.tensor([5, 4, 3, 2, 1, 0]))
    assert [shard[i].item() for i in range(3)] == [3, 2, 1]


@pytest.mark.spec("data", 15)
def test_two_permutations_cover_everything_and_all_differ():
    rng = random.Random(2)
    for _ in range(100):
        used = rng.randrange(1, 40)
        samples = used + rng.randrange(0, used)
        epochs = [permutation(samples, used, 7, index) for index in range(4)]
        for index, order in enumerate(epochs):
            assert sorted(order.tolist()) == list(range(samples))
            assert torch.equal(order, permutation(samples, used, 7, index))
        for first, second in ((0, 1), (2, 3)):
            seen = {*epochs[first][:used].tolist(), *epochs[second][:used].tolist()}
            assert seen == set(range(samples))
    assert len({tuple(order.tolist()) for order in epochs}) == 4


def test_seeds_give_sequences_of_their_own():
    orders = {tuple(permutation(20, 16, s, i).tolist()) for s in (-1, 0, 1, 2) for i in range(3)}
    assert len(orders) == 12
