"""What a loader warns of: remainders, arguments without effect, other counts than the model's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .._base import log
from .._ir.loops import Loops
from .arrangement import Arrangement
from .sharding import Shard, shard_range


def remainder(loader: Any, plan: Arrangement, process: int, processes: int, programs: int) -> None:
    """Tell about a remainder; ``process`` counts for shards, ``programs`` are the model's sizes."""
    dataset, workers = loader.dataset, loader.num_workers
    if isinstance(dataset, IterableDataset):
        if workers > 1 and loader.worker_init_fn is None:
            log.python.warning(
                "An IterableDataset with %d workers and no worker_init_fn: every element will be "
                "returned %d times, once by each worker",
                workers,
                workers,
            )
        return
    if plan.combined is None:
        return
    if loader.batch_size is None:
        _micro_batches(_length(loader.batch_sampler), plan.steps, plan.drop_last)
        return
    if isinstance(dataset, Shard):
        samples: int | None = len(dataset.dataset)
    else:
        samples, process, processes = _length(loader.sampler), 0, 1
    if samples is None or not samples % (plan.combined * processes):
        return
    if plan.drop_last:
        left = samples % (plan.combined * processes)
        if left == samples:
            log.python.warning(
                "No batch will be loaded: the data set has %d samples, and one combined batch on "
                "each of %d processes takes %d. Lower the batch size, the device iterations or the "
                "gradient accumulation.",
                samples,
                processes,
                plan.combined * processes,
            )
        else:
            log.python.info(
                "drop_last=True: %d of the data set's %d samples are left out of every iteration, "
                "since one call takes %d samples on each of %d processes.",
                left,
                samples,
                plan.combined,
                processes,
            )
        return
    size = len(shard_range(samples, plan.combined, False, process, processes))
    size = size % plan.combined or plan.combined
    begin = (
        f"The data set's {samples} samples are not divisible by the combined batch size"
        f" ({plan.combined}) x {processes} processes: the last batch of this process has {size}"
        " samples"
    )
    if programs == 1:
        log.python.warning(
            "%s, and a model that was compiled for %d rejects any other size, unless "
            "options.programs(2) lets it be compiled for that, too. Pass drop_last=True to leave "
            "it out.",
            begin,
            plan.combined,
        )
    elif size % plan.steps:
        log.python.warning(
            "%s. options.programs(%d) lets a model be compiled for that, too, but in training they "
            "must divide into %d micro-batches. Pass drop_last=True to leave it out.",
            begin,
            programs,
            plan.steps,
        )
    else:
        log.python.info("%s, for which options.programs(%d) allows a program.", begin, programs)


def _length(sampler: Any) -> int | None:
    if getattr(sampler, "reads_to_count", False):  # its length is a pass over the data set
        return None
    try:
        return len(sampler)
    except TypeError:  # samplers need no length; torch's base class has none
        return None


def _micro_batches(batches: int | None, group: int, drop_last: bool) -> None:
    if batches is None:
        if not drop_last:
            log.python.warning(
                "The length of the batch sampler is unknown and drop_last=False: the last tensor "
                "may be incomplete"
            )
    elif left := batches % group:
        begin = (
            f"The batch sampler yields {batches} micro-batches, one call takes {group}: the last"
        )
        if drop_last:
            log.python.info("%s %d are dropped", begin, left)
        else:
            log.python.warning("%s %d make the last tensor incomplete", begin, left)


def without_effect(
    plan: Arrangement,
    async_options: Any,
    rebatched_worker_size: int | None,
    others: Mapping[str, Any],
) -> None:
    ignored = {
        "async_options": bool(async_options) and not plan.asynchronous,
        "rebatched_worker_size": rebatched_worker_size is not None and plan.rebatched is None,
        "pin_memory": bool(others.get("pin_memory")) and plan.asynchronous,
    }
    names = [name for name, is_ignored in ignored.items() if is_ignored]
    if names:
        mode = "an asynchronous mode" if plan.asynchronous else "mode Sync"
        log.python.warning("DataLoader: no effect in %s: %s", mode, ", ".join(names))


class EndingEarly(Iterator[Any]):
    """Batches of a data set without a length; warns when there is not a single one."""

    def __init__(self, batches: Iterable[Any], plan: Arrangement) -> None:
        self._batches = iter(batches)
        self._plan = plan
        self._has_any = False

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._has_any:
                self._has_any = True
                log.python.warning(
                    "No batch was loaded: the data set ended before the %d samples of one combined "
                    "batch. Lower the batch size, the device iterations or the gradient "
                    "accumulation.",
                    self._plan.combined,
                )
            raise
        self._has_any = True
        return batch


_iterated: list[tuple[list[weakref.ref[Any]], Arrangement]] = []  # the last loader


def remember(loader: DataLoader[object], iteration: Any, plan: Arrangement) -> None:
    """Take a loader for the one whose batches a model gets next, while it or its loop lasts."""
    _iterated[:] = [([weakref.ref(loader), weakref.ref(iteration)], plan)]


def other_counts(tensors: Sequence[torch.Tensor], loops: Loops) -> None:
    """Warn if a training model would make other updates of a loader's batches than were meant."""
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    if loops.slices > 1 and rows and rows % loops.slices == 0:
        _loaded_by_torch(rows, loops.slices)
    for sources, plan in _iterated[:]:
        is_over = all(source() is None for source in sources)
        if is_over or plan.combined != rows or plan.steps == loops.slices:
            continue
        _iterated.clear()
        log.python.warning(
            "The batch of %d samples is that of a DataLoader which makes it of %d micro-batches of "
            "%d, and the model takes it as %d of %d: they have other device iterations, gradient "
            "accumulation or replicas. Make both with the same poptorch.Options",
            rows,
            plan.steps,
            plan.micro,
            loops.slices,
            rows // loops.slices,
        )


def _loaded_by_torch(rows: int, slices: int) -> None:
    """Warn if what is cut is as large as a batch of a loader that knows of no micro-batches."""
    samplers = (each for each in gc.get_objects() if type(each) is BatchSampler)  # once a program
    ours = any(
        plan.combined == rows and any(source() is not None for source in sources)
        for sources, plan in _iterated
    )
    if not ours and any(sampler.batch_size == rows for sampler in samplers):
        log.python.warning(
            "A batch of torch's DataLoader, batch_size=%d, is taken as %d micro-batches of %d: "
            "device iterations, gradient accumulation and replicas cut it. If a micro-batch should "
            "have %d: poptorch.DataLoader(options, dataset, batch_size=%d)",
            rows, slices, rows // slices, rows, rows,
        )  # fmt: skip
