"""Which samples a process reads, and in which order."""

import pickle
import random

import pytest
import torch

from helpers.data_sets import Numbers
from poptorch._data.sharding import Shard, permutation


class Batched(Numbers):
    classes = ("cat", "dog")

    def __getitems__(self, indices):
        return [torch.tensor(float(-i)) for i in indices]


def test_a_shard_is_a_sequence_of_its_own_samples_read_as_the_data_set_reads():
    shard = Shard(Numbers(10), range(3, 7))
    assert [shard[i].item() for i in (0, 3, -1)] == [3, 6, 6]
    for index in (4, -5):
        with pytest.raises(IndexError, match="shard of 4 samples"):
            shard[index]
    assert [t.item() for t in list(shard)] == [3, 4, 5, 6]
    assert [t.item() for t in shard.__getitems__([2, 0])] == [5, 3]
    assert pickle.loads(pickle.dumps(shard))[0].item() == 3
    turned = Shard(Numbers(6), range(2, 5), torch.arange(6).flip(0))
    assert [turned[i].item() for i in range(3)] == [3, 2, 1]
    shard = Shard(Batched(10), range(3, 7))
    assert [t.item() for t in shard.__getitems__([0, 1])] == [-3, -4]
    assert shard.classes == ("cat", "dog")
    with pytest.raises(AttributeError):
        _ = shard.unknown


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
    orders = {tuple(permutation(20, 16, s, i).tolist()) for s in (-1, 0, 1, 2) for i in range(4)}
    assert len(orders) == 16  # seeds give sequences of their own
