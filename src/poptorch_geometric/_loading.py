"""What loaders of graphs have in common: those on torch's own loader, and those on PopTorch's."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from poptorch._base.errors import Error
from poptorch.enums import DataLoaderMode
from poptorch.options import Options

from .collate import CombinedBatchingCollater, FillingCollater, FixedSizeCollater


class Plain(torch.utils.data.DataLoader[Any]):
    """On torch's own loader. Subclasses may make collaters of their own."""

    def _create_collater(self, **collater_args: Any) -> Any:
        """Return what makes a micro-batch of a list of samples."""
        return FixedSizeCollater(**collater_args)

    def _combined(self, collater: Any, size: int | None) -> Any:
        """Return what makes a batch, of so many samples in each micro-batch."""
        return collater


class Combining:
    """Joins micro-batches of graphs into the combined batch that a wrapped model takes."""

    drops_last = True

    def _take(self, options: Options | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of ``poptorch.DataLoader``.

        Raises:
            poptorch.Error: rebatching, which cuts tensors of nodes and of edges alike.
        """
        if kwargs.get("mode") is DataLoaderMode.AsyncRebatched:
            raise Error(
                "Batches of graphs cannot be assembled from smaller ones",
                got="mode=DataLoaderMode.AsyncRebatched; nodes, edges and graphs differ in number",
                fix="use mode=DataLoaderMode.Async",
            )
        self.drops_last = kwargs.get("drop_last", True)
        return {**kwargs, "options": Options() if options is None else options}

    def _combined(self, collater: Any, size: int | None) -> Any:
        kind = CombinedBatchingCollater if self.drops_last else FillingCollater
        return kind(collater, size)
