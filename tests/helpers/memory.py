"""How much memory tensors take while code runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Watermark(TorchDispatchMode):
    """Within it every new storage is counted until it is freed.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._known:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def peak_of_call(executor: Any, *args: torch.Tensor) -> int:
    """Bytes that one call of a compiled executor needs at most, beyond what there is before."""
    executor(*args)
    with Watermark() as mark:
        executor(*args)
    return mark.peak
