"""Data sets that other processes can import, for the tests of the data loader."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Numbers(Dataset):
    """Sample i is the number i, in a tensor of the given shape and type."""

    def __init__(self, size, shape=(), dtype=torch.float32):
        self.size, self.shape, self.dtype = size, shape, dtype

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.full(self.shape, index, dtype=self.dtype)
