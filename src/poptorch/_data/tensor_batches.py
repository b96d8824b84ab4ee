"""Batches of a TensorDataset without taking single samples: indexing gives what collating would.

Collating a batch of n samples makes n small tensors and stacks them; one indexed copy per tensor
gives the same values in fresh memory many times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from .sharding import Shard


class TensorBatches:
    """Iterates over the batches of a loader for which ``suits`` holds."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._tensors, self._rows = _source(loader.dataset)
        self._size = len(loader)
        self._batches = _batches(loader)
        # torch's own iterator draws its workers' seed here; drawing it too keeps the shuffles of
        # this and the following epochs the same as torch's.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def __iter__(self) -> TensorBatches:
        return self

    def __len__(self) -> int:
        return self._size

    def __next__(self) -> list[torch.Tensor]:
        batch = next(self._batches)
        if self._rows is None and isinstance(batch, range):
            return [tensor[batch.start : batch.stop].clone() for tensor in self._tensors]
        rows = torch.tensor(self._rows(batch) if self._rows else batch)
        return [_taken(tensor, rows) for tensor in self._tensors]


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows.

    Indexing wakes all of torch's threads even for a few rows, and they then wait at work for the
    next ones: a core is busy that the compiler needs. This does not, and takes 0.6 of the time.
    """
    return tensor.index_select(0, rows) if tensor.is_contiguous() else tensor[rows]


def suits(loader: DataLoader[Any]) -> bool:
    """Tell whether indexing gives exactly what fetching and collating would."""
    dataset = loader.dataset.dataset if isinstance(loader.dataset, Shard) else loader.dataset
    sampler = loader.batch_sampler
    return (
        type(dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and type(sampler) is BatchSampler
        and type(sampler.sampler) in (SequentialSampler, RandomSampler)
        and loader.num_workers == 0
        and not loader.pin_memory
        and all(map(_is_plain, dataset.tensors))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.requires_grad
    )


def _source(
    dataset: Any,
) -> tuple[Sequence[torch.Tensor], Callable[[Sequence[int]], list[int]] | None]:
    """Return the tensors, and what translates the sampler's indices to their rows, if needed."""
    if not isinstance(dataset, Shard):
        return dataset.tensors, None
    whole, part = dataset.dataset.tensors, dataset.part
    if dataset.order is None:
        return [tensor[part.start : part.start + part.length] for tensor in whole], None
    return whole, dataset.rows


def _batches(loader: DataLoader[Any]) -> Iterator[Sequence[int]]:
    sampler: Any = loader.batch_sampler
    if type(sampler.sampler) is RandomSampler:
        return iter(sampler)
    samples, size = len(sampler.sampler), sampler.batch_size
    end = samples - samples % size if sampler.drop_last else samples
    return (range(at, min(at + size, end)) for at in range(0, end, size))
