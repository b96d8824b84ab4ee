"""Loaders of graphs. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler
from torch_geometric.data import Batch

import poptorch.dataloader
from poptorch.options import Options

from .collate import CombinedBatchingCollater, FixedSizeCollater
from .fixed_size_options import FixedSizeOptions, FixedSizeStrategy, OverSizeStrategy
from .stream_packing_sampler import StreamPackingSampler

_TRIM_NODES = (OverSizeStrategy.TrimNodes, OverSizeStrategy.TrimNodesAndEdges)
_TRIM_EDGES = (OverSizeStrategy.TrimEdges, OverSizeStrategy.TrimNodesAndEdges)


class DataLoader(poptorch.dataloader.DataLoader):
    """Batches of graphs as they are, without padding; micro-batches are joined.

    Args:
        dataset: of single graphs.
        batch_size: graphs in a micro-batch.
        shuffle: new order at every iteration.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``.
        kwargs: further arguments of ``poptorch.DataLoader``.
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
        def collate(samples: Sequence[Any]) -> Batch:
            return Batch.from_data_list(
                list(samples), follow_batch=follow_batch, exclude_keys=exclude_keys
            )

        super().__init__(
            options or Options(),
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            collate_fn=CombinedBatchingCollater(batch_size, collate),
            **kwargs,
        )


class FixedSizeDataLoader(poptorch.dataloader.DataLoader):
    """Batches of graphs that all have one size, the last graphs being padding.

    Args:
        dataset: of single graphs.
        batch_size: graphs in a micro-batch, the padding graph included: 4 are 3 samples.
        shuffle: new order at every iteration.
        fixed_size_options: the sizes; by default those that the largest samples need.
        fixed_size_strategy: ``PadToMax`` takes ``batch_size - 1`` samples, ``StreamPack`` as many
            as fit, at most so many.
        over_size_strategy: what to do with samples that do not fit; ``Skip`` needs ``StreamPack``.
        add_pad_masks: add masks that are True for what is real.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``.
        kwargs: further arguments of ``poptorch.DataLoader``.

    Raises:
        AssertionError: ``collate_fn`` was given, or sizes for another number of graphs.
        ValueError: a batch sampler with ``StreamPack``, or ``Skip`` without it.
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
        assert "collate_fn" not in kwargs, "FixedSizeDataLoader has a collate_fn of its own"
        sizes = fixed_size_options or FixedSizeOptions.from_dataset(dataset, batch_size)
        assert sizes.num_graphs == batch_size, (
            f"batch_size {batch_size} includes the padding graph: "
            f"it must be num_graphs of the sizes, {sizes.num_graphs}"
        )
        collater = FixedSizeCollater(
            sizes,
            add_masks_to_batch=add_pad_masks,
            trim_nodes=over_size_strategy in _TRIM_NODES,
            trim_edges=over_size_strategy in _TRIM_EDGES,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
        )
        options = options or Options()
        skips = over_size_strategy == OverSizeStrategy.Skip
        if fixed_size_strategy == FixedSizeStrategy.StreamPack:
            if "batch_sampler" in kwargs:
                raise ValueError("StreamPack makes the batches itself; drop batch_sampler")
            packed = StreamPackingSampler(
                dataset,
                sizes.num_graphs - 1,  # one graph, one node and one edge are for padding
                sizes.total_num_nodes - 1,
                sizes.total_num_edges - 1,
                RandomSampler(dataset) if shuffle else SequentialSampler(dataset),
                allow_skip_data=skips,
            )
            super().__init__(options, dataset, batch_sampler=packed, collate_fn=collater, **kwargs)
            return
        if skips:
            raise ValueError("Samples can be skipped with FixedSizeStrategy.StreamPack only")
        real = batch_size - 1
        super().__init__(
            options,
            dataset,
            batch_size=real,
            shuffle=shuffle,
            collate_fn=CombinedBatchingCollater(real, collater),
            **kwargs,
        )
