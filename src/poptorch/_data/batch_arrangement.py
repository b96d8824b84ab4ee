"""Decide how samples become batches, from the checked arguments of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from .._base.errors import AssertionFailure, Error, InvalidType, InvalidValue
from .._ir.micro_batches import Loops
from ..enums import DataLoaderMode


@dataclass(frozen=True)
class Arrangement:
    # samples in one call; None passes the items of the data set on as they are
    combined: int | None
    micro: int  # samples in one micro-batch, if known (1 if a batch sampler does not say)
    steps: int  # micro-batches in one combined batch
    worker_batch: int | None  # batch size of torch's loader
    worker_drop_last: bool  # whether torch's loader drops an incomplete batch
    group: int  # how many of torch's batches are joined to one element
    asynchronous: bool  # whether another process loads
    rebatched: int | None  # rows of the batches that the other process combines from elements
    drop_last: bool  # whether incomplete combined batches are dropped, as the user chose


def arrange(
    loops: Loops,
    batch_size: int | None,
    batch_sampler: Any,
    drop_last: bool,
    mode: DataLoaderMode,
    rebatched_worker_size: int | None,
) -> Arrangement:
    mode = DataLoaderMode(mode)
    for name, size in (
        ("batch_size", batch_size),
        ("rebatched_worker_size", rebatched_worker_size),
    ):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InvalidValue(
                f"{name} must be a positive integer", got=repr(size), fix=f"for example {name}=16"
            )
    asynchronous = mode is not DataLoaderMode.Sync
    if batch_size is None:
        return Arrangement(None, 1, 1, None, drop_last, 1, asynchronous, None, drop_last)
    by_sampler = batch_sampler is not None
    micro = (getattr(batch_sampler, "batch_size", None) or 1) if by_sampler else batch_size
    combined = micro * loops.slices
    # The buffers have the size of the first batch, and a smaller last batch is combined in the
    # other process.
    late = mode is DataLoaderMode.Async and not drop_last and not by_sampler
    rebatches = combined > 1 and (late or mode is DataLoaderMode.AsyncRebatched)
    if rebatches and rebatched_worker_size is not None and rebatched_worker_size > combined:
        raise AssertionFailure(
            "rebatched_worker_size must not be larger than the combined batch size",
            got=f"{rebatched_worker_size} > {combined} = {micro} (batch size) x {loops}",
            fix=f"use at most {combined}, or omit rebatched_worker_size",
        )
    worker_batch = (rebatched_worker_size or combined) if rebatches else combined
    return Arrangement(
        combined=combined,
        micro=micro,
        steps=loops.slices,
        worker_batch=1 if by_sampler else worker_batch,
        worker_drop_last=drop_last and not (rebatches or by_sampler),
        group=loops.slices if by_sampler and not rebatches else 1,
        asynchronous=asynchronous,
        rebatched=combined if rebatches else None,
        drop_last=drop_last,
    )


def check_switches(**switches: Any) -> None:
    """Refuse values other than True and False, because a text such as "no" would count as True."""
    for name, value in switches.items():
        if value is not None and value not in (False, True):
            raise InvalidType(
                f"{name} must be True or False",
                got=repr(value),
                fix=f"pass {name}=True or {name}=False",
            )


def check_accessor(buffer_size: Any, miss_sleep_time_in_ms: Any, rebatched_size: Any) -> None:
    for name, value, least, kind in (
        ("buffer_size", buffer_size, 1, int),
        ("miss_sleep_time_in_ms", miss_sleep_time_in_ms, 0, int | float),
        ("rebatched_size", rebatched_size, 2, int),
    ):
        if value is not None and (not isinstance(value, kind) or value < least):
            raise AssertionFailure(
                f"{name} must be at least {least}",
                got=repr(value),
                fix=f"pass {name}={least} or more",
            )


def check_sources(
    dataset: Any, batch_sampler: Any, batch_size: int | None, shuffle: bool | None, processes: int
) -> None:
    by_hand = (
        "pass auto_distributed_partitioning=False, and let the data set yield only the part of"
    )
    if batch_sampler is not None and (batch_size != 1 or shuffle):
        raise Error(
            "batch_sampler is mutually exclusive with batch_size, shuffle",
            got=f"batch_size={batch_size}, shuffle={shuffle}",
            fix=(
                "remove batch_size and shuffle: the batch sampler chooses the size and the "
                "order of the micro-batches"
            ),
        )
    if processes == 1:
        return
    if batch_sampler is not None:
        raise Error(
            "batch_sampler is mutually exclusive with auto_distributed_partitioning=True",
            fix=(
                "let the sampler yield only the indices of this process, and pass "
                "auto_distributed_partitioning=False"
            ),
        )
    if batch_size is None:
        raise AssertionFailure(
            "batch_size=None not allowed when the data set is partitioned over processes",
            fix=f"{by_hand} this process",
        )
    if isinstance(dataset, IterableDataset):
        raise AssertionFailure(
            "auto_distributed_partitioning not supported for IterableDataset",
            fix=f"{by_hand} the process with index options.Distributed.processId",
        )
