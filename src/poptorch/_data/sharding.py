"""Decide which samples a process reads: contiguous shards, and one permutation for all
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def shard_range(
    samples: int, combined: int, drop_last: bool, process: int, processes: int
) -> range:
    """Return a process's range of positions; with ``drop_last``, all have the same number of whole
    combined batches.
    """
    if drop_last:
        length = combined * (samples // (combined * processes))
        return range(process * length, (process + 1) * length)
    length, extra = divmod(samples, processes)
    start = process * length + min(process, extra)
    return range(start, start + length + (process < extra))


class Interleaved(Sequence[int]):
    """The positions of several processes whose work one process does: ``rows`` of each,
    alternating.
    """

    def __init__(self, part: Sequence[int], processes: int, rows: int) -> None:
        self._part, self._processes, self._rows = part, processes, rows

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: Any) -> Any:
        turn, row = divmod(range(len(self))[index], self._rows)
        step, process = divmod(turn, self._processes)
        return self._part[process * len(self) // self._processes + step * self._rows + row]


class DataShard(Dataset[Any]):
    """The part of a map-style data set, or of its permutation, that one process reads."""

    def __init__(
        self, dataset: Any, part: Sequence[int], order: torch.Tensor | None = None
    ) -> None:
        self.dataset = dataset
        self.part = part
        self.order = order

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} in a shard of {len(self)} samples")
        return self.dataset[self.rows([index])[0]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = self.rows(indices)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(rows))
        return [self.dataset[row] for row in rows]

    def __getattr__(self, name: str) -> Any:
        # Scripts read attributes of their data set through the loader, with one process or many.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def rows(self, indices: Sequence[int]) -> list[int]:
        """Translate positions in the shard to indices in the whole data set."""
        positions = [self.part[index] for index in indices]
        return positions if self.order is None else self.order[positions].tolist()


def permutation(samples: int, used: int, seed: int, index: int) -> torch.Tensor:
    """Return one of a sequence of permutations, which is the same in all processes with equal
    seeds.

    Permutations come in pairs. The samples that the first one leaves out, after its ``used`` first
    positions, are among the used samples of the second, so that every two epochs cover the data
    set.
    """
    order = _drawn(samples, seed, index)
    if index % 2 == 0 or used in (0, samples):
        return order
    previous_order = _drawn(samples, seed, index - 1)[used:]
    free = torch.nonzero(~torch.isin(order, previous_order)).flatten()[-len(previous_order) :]
    stays = torch.ones(samples, dtype=torch.bool)
    stays[free] = False
    return torch.cat([order[stays], order[free]])


def _drawn(samples: int, seed: int, index: int) -> torch.Tensor:
    mixed = np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(mixed[0]))
    return torch.randperm(samples, generator=generator)
