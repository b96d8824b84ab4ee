"""Load graphs with torch's own loader. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils.data
from torch.utils.data import RandomSampler, SequentialSampler

from poptorch.poptorch_core import AssertionFailure, InvalidValue, Unsupported

from .collate import FixedSizeCollater
from .fixed_size_options import FixedSizeOptions, suited
from .pyg_collate import Collater
from .stream_packing_sampler import StreamPackingSampler


class FixedSizeStrategy(enum.Enum):
    """How many samples a micro-batch has: one less than its graphs, or the number that fits."""

    PadToMax = 0
    StreamPack = 1


class OverSizeStrategy(enum.Enum):
    """What happens to samples that are too large for a micro-batch.

    With ``StreamPack``, ``Skip`` leaves out such samples; otherwise it is ``Error``. The others
    leave out random nodes, edges, or nodes and then edges.
    """

    Error = 0
    Skip = 1
    TrimNodes = 2
    TrimEdges = 3
    TrimNodesAndEdges = 4


def refuse(loader: str, kwargs: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name in kwargs:
            raise AssertionFailure(
                f"{loader} does not support the argument {name!r}",
                got=repr(kwargs[name]),
                fix="omit the argument: the loader sets it itself",
            )


class PlainLoader(torch.utils.data.DataLoader[Any]):
    """A loader based on torch's DataLoader. Subclasses may create their own collaters."""

    def _create_collater(self, **collater_args: Any) -> Any:
        """Return the collater that makes a micro-batch from a list of samples."""
        return FixedSizeCollater(**collater_args)

    def _fixed(
        self, sizes: FixedSizeOptions, masks: bool, strategy: OverSizeStrategy, **others: Any
    ) -> Any:
        both = OverSizeStrategy.TrimNodesAndEdges
        return self._create_collater(
            fixed_size_options=sizes,
            add_masks_to_batch=masks,
            trim_nodes=strategy in (OverSizeStrategy.TrimNodes, both),
            trim_edges=strategy in (OverSizeStrategy.TrimEdges, both),
            **others,
        )

    def _combined(self, collater: Any, size: int | None) -> Any:
        """Return the collater of a batch with this number of samples in each micro-batch."""
        return collater


class DataLoader(PlainLoader):
    """Load batches of graphs without padding.

    Arguments are those of ``poptorch_geometric.dataloader.DataLoader``, without ``options``.
    ``kwargs`` are other arguments of torch's loader.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("collate_fn", None)
        self.follow_batch, self.exclude_keys = follow_batch, exclude_keys
        collater = self._create_collater(follow_batch=follow_batch, exclude_keys=exclude_keys)
        super().__init__(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            collate_fn=self._combined(collater, batch_size),
            **kwargs,
        )

    def _create_collater(self, **collater_args: Any) -> Any:
        return Collater(**collater_args)


class FixedSizeDataLoader(PlainLoader):
    """Load batches of graphs that all have the same size; the last graphs are padding.

    Arguments and errors are those of ``poptorch_geometric.FixedSizeDataLoader``, without
    ``options``. ``kwargs`` are other arguments of torch's loader.
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
        **kwargs: Any,
    ) -> None:
        refuse("FixedSizeDataLoader", kwargs, "collate_fn")
        sizes = fixed_size_options or FixedSizeOptions.from_dataset(dataset, batch_size)
        if sizes.num_graphs != batch_size:
            raise AssertionFailure(
                "batch_size and num_graphs of the FixedSizeOptions must match",
                got=f"batch_size={batch_size}, num_graphs={sizes.num_graphs}",
                fix="use the same number for both; it includes the padding graph",
            )
        self.fixed_size_options = suited(sizes, dataset[0])
        self.padded_batch_size = batch_size
        keys = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
        collater = self._fixed(sizes, add_pad_masks, over_size_strategy, **keys)
        sampler = kwargs.pop("batch_sampler", None)
        if fixed_size_strategy is FixedSizeStrategy.StreamPack:
            if sampler is not None:
                raise InvalidValue(
                    "A batch_sampler is incompatible with FixedSizeStrategy.StreamPack",
                    fix=(
                        "use PadToMax, or remove the batch_sampler: StreamPack assembles the "
                        "micro-batches itself"
                    ),
                )
            sampler = _packing(dataset, sizes, shuffle, over_size_strategy)
        elif fixed_size_strategy is not FixedSizeStrategy.PadToMax:
            raise Unsupported(
                "Unknown fixed_size_strategy",
                got=repr(fixed_size_strategy),
                fix=f"use {' or '.join(map(str, FixedSizeStrategy))}",
            )
        cut: dict[str, Any] = {"batch_size": batch_size - 1, "shuffle": shuffle}
        if sampler is not None:
            cut = {"batch_sampler": sampler}
        collate = self._combined(collater, cut.get("batch_size"))
        super().__init__(dataset=dataset, collate_fn=collate, **cut, **kwargs)


def _packing(
    dataset: Any, sizes: FixedSizeOptions, shuffle: bool, strategy: OverSizeStrategy
) -> StreamPackingSampler:
    """Leave one graph, and one node and edge of each type, for padding."""
    sampler = StreamPackingSampler(
        dataset,
        sizes.num_graphs - 1,
        _less(sizes.num_nodes),
        _less(sizes.num_edges),
        base_sampler=RandomSampler(dataset) if shuffle else SequentialSampler(dataset),
        allow_skip_data=strategy is OverSizeStrategy.Skip,
    )
    sampler._trims = strategy not in (OverSizeStrategy.Error, OverSizeStrategy.Skip)
    return sampler


def _less(sizes: Any) -> Any:
    if isinstance(sizes, Mapping):
        return {kind: size - 1 for kind, size in sizes.items()}
    return sizes - 1
