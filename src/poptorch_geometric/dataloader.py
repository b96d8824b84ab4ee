"""Loaders of graphs for wrapped models. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import poptorch.dataloader
from poptorch.options import Options

from . import pyg_dataloader
from ._loading import Combining
from .fixed_size_options import FixedSizeOptions
from .pyg_dataloader import FixedSizeStrategy, OverSizeStrategy

__all__ = ["DataLoader", "FixedSizeDataLoader", "FixedSizeStrategy", "OverSizeStrategy"]


class DataLoader(Combining, pyg_dataloader.DataLoader, poptorch.dataloader.DataLoader):
    """Batches of graphs as they are, without padding; micro-batches are joined along dimension 0.

    Samples must have equal sizes already, for instance by ``torch_geometric.transforms.Pad``.

    Args:
        dataset: of single graphs.
        batch_size: graphs in a micro-batch.
        shuffle: new order at every iteration.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``; frozen from now on.
        kwargs: further arguments of ``poptorch.DataLoader``; a ``collate_fn`` is dropped.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            follow_batch,
            exclude_keys,
            **self._take(options, kwargs),
        )


class FixedSizeDataLoader(
    Combining, pyg_dataloader.FixedSizeDataLoader, poptorch.dataloader.DataLoader
):
    """Batches of graphs that all have one size, the last graphs being padding.

    With ``drop_last=False`` the last micro-batch may have fewer samples and more padding.

    Args:
        dataset: of single graphs, by index.
        batch_size: graphs in a micro-batch, the padding graph included: 4 are 3 samples.
        shuffle: new order at every iteration.
        fixed_size_options: the sizes; by default those that any samples fit into.
        fixed_size_strategy: ``PadToMax`` takes ``batch_size - 1`` samples, ``StreamPack`` as many
            as fit, at most so many.
        over_size_strategy: what to do with samples that do not fit.
        add_pad_masks: add masks that are True for what is real.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``; frozen from now on.
        kwargs: further arguments of ``poptorch.DataLoader``.

    Raises:
        AssertionError: ``collate_fn`` was given, or sizes for another number of graphs.
        ValueError: a batch sampler with ``StreamPack``.
        NotImplementedError: an unknown strategy.
        poptorch.Error: rebatching.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 2,
        shuffle: bool = False,
        fixed_size_options: FixedSizeOptions | None = None,
        fixed_size_strategy: FixedSizeStrategy = FixedSizeStrategy.PadToMax,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.Error,
        add_pad_masks: bool = True,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            fixed_size_options,
            fixed_size_strategy,
            over_size_strategy,
            add_pad_masks,
            follow_batch,
            exclude_keys,
            **self._take(options, kwargs),
        )
