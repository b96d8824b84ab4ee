"""What a new loader tells: a data set that does not divide, arguments that do nothing.

Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from .. import _job
from .._base import log
from .arrangement import Arrangement
from .sharding import Shard, shard_range


@dataclass(frozen=True)
class Notice:
    """Something to tell about a data set's size."""

    is_warning: bool
    text: str


def remainder(
    loader: Any, plan: Arrangement, process: int, processes: int, programs: int = 1
) -> None:
    """Log what is worth telling about a loader's data, at the level that it deserves.

    Args:
        loader: torch's loader, complete.
        plan: what it cuts.
        process: which process this is, when the data set is a shard.
        processes: how many there are then.
        programs: for how many kinds of inputs a model may be compiled.
    """
    notice = _notice(loader, plan, process, processes, programs)
    if notice is not None:
        level = logging.WARNING if notice.is_warning else logging.INFO
        log.python.log(level, "%s", notice.text)


def without_effect(
    plan: Arrangement,
    async_options: Any,
    rebatched_worker_size: int | None,
    others: Mapping[str, Any],
) -> None:
    """Log the arguments that were given and do nothing in the loader's mode."""
    ignored = {
        "async_options": bool(async_options) and not plan.asynchronous,
        "rebatched_worker_size": rebatched_worker_size is not None and plan.rebatched is None,
        "pin_memory": bool(others.get("pin_memory")) and plan.asynchronous,
    }
    names = [name for name, is_ignored in ignored.items() if is_ignored]
    if names:
        mode = "an asynchronous mode" if plan.asynchronous else "mode Sync"
        log.python.warning("DataLoader: no effect in %s: %s", mode, ", ".join(names))


class EndingEarly:
    """Batches of a data set without a length; warns when there is not a single one.

    Args:
        batches: to iterate over.
        plan: how many samples make one.
    """

    def __init__(self, batches: Iterable[Any], plan: Arrangement) -> None:
        self._batches = iter(batches)
        self._plan = plan
        self._begun = False

    def __iter__(self) -> EndingEarly:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._begun:
                self._begun = True
                log.python.warning(
                    "No batch was loaded: the data set ended before the %d samples of one combined "
                    "batch. Lower the batch size, the device iterations or the gradient "
                    "accumulation.",
                    self._plan.combined,
                )
            raise
        self._begun = True
        return batch


def _notice(
    loader: Any, plan: Arrangement, process: int, processes: int, programs: int
) -> Notice | None:
    dataset, workers = loader.dataset, loader.num_workers
    if isinstance(dataset, IterableDataset):
        if workers < 2 or loader.worker_init_fn is not None:
            return None
        return Notice(
            True,
            f"An IterableDataset with {workers} workers and no worker_init_fn: every element will"
            f" be returned {workers} times, once by each worker",
        )
    if plan.combined is None:
        return None
    if loader.batch_size is None:
        return _on_batches(_length(loader.batch_sampler), plan.steps, plan.drop_last)
    if isinstance(dataset, Shard):
        samples: int | None = len(dataset.dataset)
    else:
        samples, process, processes = _length(loader.sampler), 0, 1
    if samples is None or not samples % (plan.combined * processes):
        return None
    if not plan.drop_last:
        size = shard_range(samples, plan.combined, False, process, processes).length
        size = size % plan.combined or plan.combined
        return _of_last_batch(samples, processes, plan, size, programs)
    return _of_left_samples(samples, plan.combined, processes)


def _length(sampler: Any) -> int | None:
    if getattr(sampler, "reads_to_count", False):  # its length is a pass over the data set
        return None
    try:
        return len(sampler)
    except TypeError:  # samplers need no length; torch's base class has none
        return None


def _of_last_batch(
    samples: int, processes: int, plan: Arrangement, size: int, programs: int
) -> Notice:
    """Tell about a last batch of another size, which needs a program of its own."""
    begin = (
        f"The data set's {samples} samples are not divisible by the combined batch size"
        f" ({plan.combined}) x {processes} processes: the last batch of this process has {size}"
        " samples"
    )
    if programs == 1:
        return Notice(
            True,
            f"{begin}, and a model that was compiled for {plan.combined} rejects any other size,"
            " unless options.programs(2) lets it be compiled for that, too. Pass drop_last=True to"
            " leave it out.",
        )
    if size % plan.steps:
        return Notice(
            True,
            f"{begin}. options.programs({programs}) lets a model be compiled for that, too, but in"
            f" training they must divide into {plan.steps} micro-batches. Pass drop_last=True to"
            " leave it out.",
        )
    return Notice(False, f"{begin}, for which options.programs({programs}) allows a program.")


def _of_left_samples(samples: int, combined: int, processes: int) -> Notice:
    """Tell about samples that are never used."""
    left = samples % (combined * processes)
    if left == samples:
        return Notice(
            True,
            f"No batch will be loaded: the data set has {samples} samples, and one combined batch"
            f" on each of {processes} processes takes {combined * processes}. Lower the batch"
            " size, the device iterations or the gradient accumulation.",
        )
    return Notice(
        False,
        f"drop_last=True: {left} of the data set's {samples} samples are left out of every"
        f" iteration, since one call takes {combined} samples on each of {processes} processes.",
    )


def _on_batches(batches: int | None, group: int, drop_last: bool) -> Notice | None:
    """Tell about micro-batches of a sampler that do not fill a combined batch."""
    if batches is None:
        if drop_last:
            return None
        return Notice(
            True,
            "The length of the batch sampler is unknown and drop_last=False: the last tensor may"
            " be incomplete",
        )
    left = batches % group
    if not left:
        return None
    fate = "are dropped" if drop_last else "make the last tensor incomplete"
    return Notice(
        not drop_last,
        f"The batch sampler yields {batches} micro-batches, one call takes {group}: the last"
        f" {left} {fate}",
    )


def announce_length(loader: Any) -> None:
    """Say for how many calls this process has data: all processes must make as many."""
    seed = None if loader._permutations is None else loader.options.random_seed
    try:
        _job.note_data_length(len(loader), seed)
    except TypeError:  # the data set has no length
        _job.note_data_length(-1, seed)
