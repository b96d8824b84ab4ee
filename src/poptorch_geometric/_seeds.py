"""Batches that were sampled around seeds, and know how many there were."""

from __future__ import annotations

from typing import Any

from .common import DataBatch


class SeedBatch(DataBatch):  # type: ignore[misc]
    """A batch whose ``batch_size`` is the number of its seeds.

    Of other batches torch_geometric's ``batch_size`` is another name of ``num_graphs``.
    """

    @property
    def batch_size(self) -> int:
        """How many of the first nodes are seeds."""
        return int(self["batch_size"])

    def __reduce__(self) -> Any:
        return _made, (), self.__dict__.copy()


def _made() -> Any:
    return with_seeds(DataBatch())


def with_seeds(batch: Any) -> Any:
    """Let a batch tell the number of its seeds."""
    object.__setattr__(batch, "__class__", SeedBatch)  # past the batch's own, for attributes
    return batch
