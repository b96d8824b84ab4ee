"""Warn about remainders, arguments without effect, and different counts of a loader and a model."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .._base import log
from .._ir.micro_batches import Loops
from .batch_arrangement import Arrangement
from .sharding import DataShard, shard_range


def remainder(loader: Any, plan: Arrangement, process: int, processes: int, programs: int) -> None:
    """Warn about a remainder; ``process`` is used for shards, ``programs`` is the number of
    compiled sizes.
    """
    dataset, workers = loader.dataset, loader.num_workers
    if isinstance(dataset, IterableDataset):
        if workers > 1 and loader.worker_init_fn is None and not _divides_itself(dataset):
            log.python.warning(
                f"An IterableDataset is loaded with {workers} workers and without a "
                "worker_init_fn, and its code does not call torch.utils.data.get_worker_info(). "
                f"Every element is returned {workers} times, once by each worker, unless the data "
                "set divides itself in another way"
            )
        return
    if plan.combined is None:
        return
    if loader.batch_size is None:
        _micro_batches(_length(loader.batch_sampler), plan.steps, plan.drop_last)
        return
    if isinstance(dataset, DataShard):
        samples: int | None = len(dataset.dataset)
    else:
        samples, process, processes = _length(loader.sampler), 0, 1
    together = plan.combined * processes
    if samples is None or not samples % together:
        return
    if plan.drop_last and samples < together:
        log.python.warning(
            f"No batch will be loaded: the data set has {samples} samples, and one combined batch "
            f"on each of {processes} processes takes {together}. Lower the batch size, the device "
            "iterations or the gradient accumulation."
        )
    elif plan.drop_last:
        log.python.info(
            f"drop_last=True: {samples % together} of the {samples} samples of the data set "
            f"are left out of every epoch, because one call takes {plan.combined} samples on "
            f"each of {processes} processes."
        )
    else:
        size = len(shard_range(samples, plan.combined, False, process, processes))
        _incomplete(plan, samples, size % plan.combined or plan.combined, processes, programs)


def _divides_itself(dataset: object) -> bool:
    """Return whether the code of a data set, or of one inside it, looks up its own worker.

    This reads the names that the code uses, because the warning is given before a worker runs. In a
    worker it could not be observed either: scripts import ``get_worker_info`` by name, so no other
    function can take its place.
    """
    held = [each for each in vars(dataset).values() if isinstance(each, IterableDataset)]
    own = [cls for cls in type(dataset).__mro__ if cls not in IterableDataset.__mro__]
    functions = [each for cls in own for each in vars(cls).values()]
    found = {each for each in functions if isinstance(each, types.FunctionType)}
    looked_at: set[types.FunctionType] = set()
    while found:
        function = found.pop()
        looked_at.add(function)
        names = set(_names(function.__code__))
        if "get_worker_info" in names:
            return True
        called = (function.__globals__.get(name) for name in names)
        found |= {each for each in called if isinstance(each, types.FunctionType)} - looked_at
    return any(map(_divides_itself, held))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _incomplete(plan: Arrangement, samples: int, size: int, processes: int, programs: int) -> None:
    begin = (
        f"The data set's {samples} samples are not divisible by the combined batch size"
        f" ({plan.combined}) x {processes} processes: the last batch of this process has {size}"
        " samples"
    )
    if programs == 1:
        log.python.warning(
            f"{begin}. A model with options.programs(1) that was compiled for {plan.combined} "
            "samples rejects any other size. Remove options.programs(1), or pass drop_last=True "
            "to leave the incomplete batch out."
        )
    elif samples % processes:
        log.python.info(
            f"{begin}. The last batches of the processes differ in size: a training model refuses "
            "them, and an inference model compiles another program."
        )
    else:
        log.python.info(f"{begin}, for which a model compiles another program.")


def _length(sampler: Any) -> int | None:
    # to get its length, it must read the whole data set
    if getattr(sampler, "reads_to_count", False):
        return None
    try:
        return len(sampler)
    except TypeError:  # samplers need no length, and torch's base class has none
        return None


def rows_of_last(loader: Any, plan: Arrangement) -> int | None:
    """Return the size of the last batch of a loader that keeps incomplete batches, if known."""
    if plan.combined is None or plan.drop_last or isinstance(loader.dataset, IterableDataset):
        return None
    samples = None if loader.batch_size is None else _length(loader.sampler)
    return samples and (samples % plan.combined or plan.combined)


def _micro_batches(batches: int | None, group: int, drop_last: bool) -> None:
    if batches is None:
        if not drop_last:
            log.python.warning(
                "The length of the batch sampler is unknown and drop_last=False: the last tensor "
                "may be incomplete. To drop an incomplete batch, pass drop_last=True"
            )
    elif left := batches % group:
        begin = f"The batch sampler yields {batches} micro-batches, one call takes {group}: the"
        if drop_last:
            log.python.info(f"{begin} last {left} are dropped")
        else:
            log.python.warning(
                f"{begin} last {left} make the last tensor incomplete. To drop them, pass "
                "drop_last=True"
            )


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
        log.python.warning(
            "DataLoader: these arguments have no effect in %s: %s", mode, ", ".join(names)
        )


class EndingEarly(Iterator[Any]):
    """Batches of a data set without a length. It warns if there is not a single batch."""

    def __init__(self, batches: Iterable[Any], plan: Arrangement) -> None:
        self._batches, self._plan = iter(batches), plan
        self._has_any = False

    def __next__(self) -> Any:
        for batch in self._batches:
            self._has_any = True
            return batch
        if not self._has_any:
            self._has_any = True
            log.python.warning(
                f"No batch was loaded: the data set ended before the {self._plan.combined} samples "
                "of one combined batch. Lower the batch size, the device iterations or the "
                "gradient accumulation."
            )
        raise StopIteration


_latest: tuple[list[weakref.ref[Any]], Arrangement] | None = (
    None  # loader and iteration, and their plan
)


def remember(loader: DataLoader[object], iteration: Any, plan: Arrangement) -> None:
    """Remember that a model gets its next batches from this loader, as long as the loader or its
    loop exists.
    """
    global _latest
    _latest = [weakref.ref(loader), weakref.ref(iteration)], plan


def other_counts(tensors: Sequence[torch.Tensor], loops: Loops) -> None:
    """Warn if a training model divides a loader's batches into other updates than the loader was
    made for.
    """
    global _latest
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    sources, plan = _latest or ([], None)
    if plan is None or plan.combined != rows or all(source() is None for source in sources):
        if loops.slices > 1 and rows and rows % loops.slices == 0:
            _loaded_by_torch(rows, loops.slices)
    elif plan.steps != loops.slices:
        _latest = None
        log.python.warning(
            f"The DataLoader assembled this batch of {rows} samples from {plan.steps} "
            f"micro-batches of {plan.micro}, but the model divides it into {loops.slices} "
            f"micro-batches of {rows // loops.slices}, because the loader and the model have "
            "different device iterations, gradient accumulation or replicas. Create both "
            "with the same poptorch.Options"
        )


def _loaded_by_torch(rows: int, slices: int) -> None:
    """Warn if the divided batch is as large as a batch of torch's own loader, which does not
    assemble micro-batches.
    """
    samplers = (each for each in gc.get_objects() if type(each) is BatchSampler)  # once per program
    if any(sampler.batch_size == rows for sampler in samplers):
        log.python.warning(
            f"A batch of torch's DataLoader with batch_size={rows} is divided into {slices} "
            f"micro-batches of {rows // slices} rows, one for each device iteration, "
            f"accumulation step and replica. If each micro-batch should have {rows} rows, use "
            f"poptorch.DataLoader(options, dataset, batch_size={rows})"
        )
