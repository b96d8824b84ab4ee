"""The short way through a TensorDataset gives what torch's own loader gives."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from helpers import programs
from poptorch._data.combining import TensorBatches, indexable
from poptorch._data.sharding import Shard


def data(n=23):
    tensors = torch.rand(n, 3), torch.arange(n), torch.rand(n, 2, 2).half()
    return TensorDataset(*tensors)


def same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b)
        assert len(a) == len(b)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 30])
@pytest.mark.parametrize("has_generator", [True, False])
def test_same_batches_over_several_epochs(batch_size, shuffle, drop_last, has_generator):
    dataset = data()

    def epochs(iterate):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5) if has_generator else None
        loader = DataLoader(
            dataset, batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator
        )
        batches = [batch for _ in range(3) for batch in iterate(loader)]
        return batches, torch.rand(2)

    assert indexable(DataLoader(dataset, batch_size, shuffle=shuffle))
    expected, after = epochs(iter)
    got, after_too = epochs(TensorBatches)
    same(got, expected)
    assert torch.equal(after, after_too)  # the same draws from torch's generator


def test_the_batches_are_the_caller_s_own():
    dataset = data()
    before = dataset.tensors[0].clone()
    for batch in TensorBatches(DataLoader(dataset, 5)):
        batch[0].zero_()
    assert torch.equal(dataset.tensors[0], before)


@pytest.mark.parametrize("order", [None, torch.randperm(23)])
def test_shards(order):
    shard = Shard(data(), range(4, 19), order)
    loader = DataLoader(shard, 4)
    assert indexable(loader)
    same(list(TensorBatches(loader)), list(loader))
    assert len(TensorBatches(loader)) == 4


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return [2 * t for t in super().__getitem__(index)]


@pytest.mark.parametrize(
    "dataset, arguments",
    [
        (Augmented(torch.ones(4)), {}),
        (Subset(data(), [1, 2]), {}),
        (data(), {"collate_fn": lambda samples: default_collate(samples)}),
        (data(), {"num_workers": 1}),
        (data(), {"batch_size": None}),
        (data(), {"sampler": [3, -1, 2]}),
        (data(), {"batch_sampler": [[3, -1], [2]], "batch_size": 1}),
        (TensorDataset(torch.ones(4, requires_grad=True)), {}),
    ],
)
def test_anything_unusual_goes_the_long_way(dataset, arguments):
    assert not indexable(DataLoader(dataset, **{"batch_size": 2, **arguments}))


def test_torch_s_own_samplers_go_the_short_way():
    dataset = data()
    for sampler in (SequentialSampler(dataset), RandomSampler(dataset, num_samples=9)):
        assert indexable(DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False)))


WAKING = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from poptorch._data.combining import TensorBatches
torch.set_num_threads(2)
loader = DataLoader(TensorDataset(torch.rand(100, 784)), 16, shuffle=True)
before = len(os.listdir("/proc/self/task"))
batches = list(TensorBatches(loader))
after = len(os.listdir("/proc/self/task"))
loader.dataset.tensors[0][torch.arange(16)]
print(len(batches), after - before, len(os.listdir("/proc/self/task")) > after)
"""


@pytest.mark.slow
def test_no_thread_is_woken_for_a_batch():
    """Indexing, the last line, starts one: it waits at work beside the compiler."""
    done = programs.run("-c", WAKING)
    assert done.stdout == "7 0 True\n", done.stderr


def test_rows_of_tensors_that_are_not_contiguous():
    dataset = TensorDataset(torch.rand(9, 4).t().contiguous().t(), torch.rand(9, 2, 3, 4)[..., 0])
    loader = DataLoader(dataset, 4, shuffle=True)
    torch.manual_seed(0)
    expected = list(loader)
    torch.manual_seed(0)
    same(list(TensorBatches(loader)), expected)
