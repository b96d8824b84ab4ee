"""Define the loaders ``DataLoader`` and ``AsynchronousDataAccessor``, and ``PadToSizes``, which
pads sequences to sizes that the user chose.

The loading processes and their buffers are implemented in ``_data``. Source: PopTorch user guide,
"Efficient data batching".
"""

from __future__ import annotations

import multiprocessing
import operator
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import default_collate

from . import _job
from ._base import source
from ._base.errors import AssertionFailure, Error, InvalidType, InvalidValue
from ._data import batch_arrangement, loader_warnings
from ._data.combining import Grouped, TensorBatches, indexable, join
from ._data.consumer import Consumer
from ._data.producer import LoaderSettings
from ._data.sharding import DataShard, Interleaved, permutation, shard_range
from ._ir.micro_batches import Loops
from .enums import DataLoaderMode, SharingStrategy
from .options import Options
from .options.distributed import data_share, replicas
from .profiling import Channel

__all__ = ["AsynchronousDataAccessor", "DataLoader", "PadToSizes", "join"]


_MISSING: Any = object()
_ORDER = "The first argument of DataLoader must be a poptorch.Options"
_CALL = (
    "call poptorch.DataLoader(options, dataset, batch_size=...) with options = poptorch.Options()"
)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Load a data set in combined batches, one for each call of a wrapped model.

    Dimension 0 of every tensor is ``batch_size x device iterations x input groups x gradient
    accumulation``. A micro-batch consists of consecutive samples.

    Args:
        options: the options of the model; this call freezes them.
        dataset: map-style, or an ``IterableDataset``. Each process of a job reads a contiguous
            part of it.
        batch_size: number of samples of a micro-batch. None, together with ``drop_last=False``,
            passes items on unchanged.
        shuffle: use a new order in every epoch. In a job, set ``options.randomSeed``, so that all
            processes use the same order.
        num_workers: number of worker processes.
        drop_last: leave out an incomplete combined batch at the end. (In PyTorch the default is
            False.)
        persistent_workers: keep the workers between epochs; the default if there are workers.
        auto_distributed_partitioning: give each process a part of the data instead of all of it.
        mode: ``Sync`` loads in this process, ``Async`` in another one, and ``AsyncRebatched`` in
            another one that joins small batches to combined ones.
        async_options: arguments of ``AsynchronousDataAccessor``. ``sharing_strategy`` is ``Fork``
            by default if there are workers and Python's start method is "fork".
        rebatched_worker_size: number of samples in the small batches of ``AsyncRebatched``. The
            default and the maximum is the combined batch size.
        batch_sampler: yields the indices of one micro-batch at a time. It cannot be combined with
            ``batch_size``, ``shuffle`` and automatic partitioning.
        kwargs: other arguments of ``torch.utils.data.DataLoader``. ``pin_memory`` has an effect in
            mode ``Sync`` only.

    Raises:
        AssertionError: ``options`` is not a ``poptorch.Options``, or arguments cannot be combined.
        poptorch.Error: ``batch_sampler`` cannot be combined with another argument, or the loading
            process does not start.

    Source: PopTorch user guide, "Efficient data batching".
    """

    dataset: Any
    sampler: Any
    batch_sampler: Any

    def __init__(
        self,
        options: Options = _MISSING,
        dataset: Any = _MISSING,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        _check(options, dataset, async_options)
        batch_arrangement.check_switches(shuffle=shuffle, drop_last=drop_last)
        batch_arrangement.check_switches(
            auto_distributed_partitioning=auto_distributed_partitioning
        )
        options._freeze()
        self._options = options
        self._accessor: AsynchronousDataAccessor | None = None
        self._permuted: tuple[int, int, int] | None = None  # arguments that determine a permutation
        self._order_index = 0  # index of the next permutation
        self._by_workers: weakref.ref[_WorkersIteration] | None = None
        process, shares = data_share(options.Distributed)
        processes = shares if auto_distributed_partitioning else 1
        each = options.Distributed._each if auto_distributed_partitioning else 1
        has_sampler = batch_sampler is not None
        batch_arrangement.check_sources(
            dataset, batch_sampler, batch_size, shuffle, processes * each
        )
        loops = Loops(
            options.device_iterations, options.Training.gradient_accumulation,
            replicas(options), options.input_group_size,
        )  # fmt: skip
        self._plan = batch_arrangement.arrange(
            loops, batch_size, batch_sampler, drop_last, mode, rebatched_worker_size
        )
        if self._plan.rebatched is not None:
            self.rebatched_drop_last = drop_last
        alike = options.Distributed.stage_processes > 1 and auto_distributed_partitioning
        in_one_order = alike and shuffle and batch_size is not None
        if processes * each > 1 or in_one_order:
            dataset, shuffle = self._shard(dataset, bool(shuffle)), False
        if hasattr(type(dataset), "__getitem__"):
            dataset = Channel("dataset").instrument(dataset, "__getitem__")
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(
            dataset,
            batch_size=self._plan.worker_batch,
            shuffle=shuffle if has_sampler else bool(shuffle),
            num_workers=num_workers,
            drop_last=self._plan.worker_drop_last,
            persistent_workers=persistent_workers,
            batch_sampler=batch_sampler,
            **kwargs,
        )
        self._profiling = Channel("poptorch.DataLoader")
        programs = options._values["programs"]
        loader_warnings.remainder(self, self._plan, process, processes, programs)
        loader_warnings.without_effect(self._plan, async_options, rebatched_worker_size, kwargs)
        if self._plan.asynchronous:
            self._accessor = AsynchronousDataAccessor(
                # Only the base class, because a subclass's own __iter__ would run both in the other
                # process and here.
                self._for_another_process(DataLoader),
                **(_started_as() | (async_options or {})),
                rebatched_size=self._plan.rebatched,
            )

    @property
    def combinedBatchSize(self) -> int | None:
        """The size of dimension 0 of every tensor; None if ``batch_size`` is None."""
        return self._plan.combined

    @property
    def options(self) -> Options:
        """The options with which the loader was created."""
        return self._options

    def terminate(self) -> None:
        """Stop the loading process, if there is one. Calling it again does no harm."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        """Return the number of combined batches.

        Raises:
            TypeError: the data set has no length.
        """
        plan = self._plan
        if plan.rebatched is not None:
            units, size = self._samples(), plan.rebatched
        elif plan.group > 1:
            units, size = len(self.batch_sampler), plan.group
        else:
            return super().__len__()
        full, left = divmod(units, size)
        return full + (left > 0 and not plan.drop_last)

    def __iter__(self) -> Any:
        """Begin an iteration.

        Returns:
            A new iterator. In the asynchronous modes it ends the previous one.
        """
        iteration = self._begin()
        loader_warnings.remember(self, iteration, self._plan)
        return iteration

    def _begin(self) -> Any:
        if self._options is not None and self._options.Distributed.numProcesses > 1:
            # All processes must take part in this exchange equally often; -1 means that the data
            # set has no length.
            seed = None if self._permuted is None else self.options.random_seed
            last = loader_warnings.rows_of_last(self, self._plan)
            _job.note_data_length(_job.DataLength(operator.length_hint(self, -1), seed, last))
        if self._accessor is not None:
            return _RemoteIteration(self, iter(self._accessor)._consumer)
        self._retire_workers()
        if self._permuted is not None:
            self._reorder(permutation(*self._permuted, self._order_index))
            self._order_index += 1
        batches: Any = TensorBatches(self) if indexable(self) else self._iterate()
        plan = self._plan
        if plan.group > 1:
            return Grouped(batches, plan.group, plan.drop_last)
        if plan.combined is not None and isinstance(self.dataset, torch.utils.data.IterableDataset):
            return loader_warnings.EndingEarly(batches, plan)
        return batches

    def _retire_workers(self) -> None:
        """Stop reusing persistent workers while another iterator still uses them."""
        latest = self._by_workers() if self._by_workers is not None else None
        if latest is not None and latest.is_over:
            latest.end()
        elif latest is not None:
            self._iterator = None

    def _iterate(self) -> Any:
        """Return torch's iterator, with new workers if the persistent ones do not answer."""
        try:
            batches = super().__iter__()
        except RuntimeError as error:
            if self._iterator is None:
                raise
            self._iterator = None
            # If a reference cycle keeps their iterator alive, torch takes 5 seconds per worker to
            # end them.
            traceback.clear_frames(error.__traceback__)
            batches = super().__iter__()
        if not self.persistent_workers:
            return batches
        iteration = _WorkersIteration(batches)
        self._by_workers = weakref.ref(iteration)
        return iteration

    def _shard(self, dataset: Any, shuffles: bool) -> DataShard:
        options, plan = self.options, self._plan
        process, processes = data_share(options.Distributed)
        samples = len(dataset)
        assert plan.combined is not None  # check_sources has already refused None
        part: Sequence[int] = shard_range(
            samples, plan.combined, plan.drop_last, process, processes
        )
        each = options.Distributed._each
        if each > 1 and (plan.drop_last or not samples % (plan.combined * processes)):
            steps = options.device_iterations * options.Training.gradient_accumulation
            part = Interleaved(part, each, plan.combined // (steps * each))
        if shuffles:
            if not options.exists("random_seed"):
                raise AssertionFailure(
                    "To shuffle on several processes you must set poptorch.Options.randomSeed()",
                    fix="set the same seed in all processes, so that they use the same order",
                )
            used = len(part) * processes if plan.drop_last else samples
            self._permuted = samples, used, options.random_seed
        return DataShard(dataset, part)

    def _reorder(self, order: torch.Tensor) -> None:
        """Use a new order in the next iteration, without changing iterations that still run."""
        if self._iterator is not None:
            self.dataset.order.copy_(order)  # the workers share this tensor
            return
        if self.persistent_workers:
            order.share_memory_()  # type: ignore[no-untyped-call]
        # Bypass torch's check of this attribute. The size, which is all that torch's samplers know,
        # stays the same.
        self.__dict__["dataset"] = DataShard(self.dataset.dataset, self.dataset.part, order)

    def _for_another_process(self, kind: type[DataLoader]) -> DataLoader:
        """Return a copy of this loader for a loading process; the copy loads synchronously."""
        other = object.__new__(kind)
        other.__dict__.update(self.__dict__, _options=None, _by_workers=None, _iterator=None)
        other._accessor = None
        other.pin_memory = False  # the elements are copied once more anyway
        return other

    def _samples(self) -> int:
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            return len(self.dataset)  # type: ignore[arg-type]
        if self.batch_size is None:
            return len(self.batch_sampler) * self._plan.micro
        return len(self.sampler)


class _WorkersIteration(Iterator[Any]):
    """One iteration with torch's persistent workers, which can serve only one iteration at
    a time.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.is_over = False  # the workers may then begin another iteration

    def end(self) -> None:
        self._batches = iter(())

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except BaseException:
            self.is_over = True
            raise


class _RemoteIteration(Iterator[Any]):
    """One iteration of a loading process. It keeps the loader alive, because the process ends with
    the loader.
    """

    def __init__(self, owner: DataLoader, consumer: Consumer) -> None:
        self._owner, self._consumer = owner, consumer
        self._number = consumer.iteration

    def __next__(self) -> Any:
        if self._consumer.iteration != self._number:
            raise Error(
                "A newer iterator over the same asynchronous loader has replaced this one",
                fix=(
                    "finish one loop before you start the next one",
                    "or create a second loader, or pass mode=poptorch.DataLoaderMode.Sync",
                ),
            )
        return self._consumer.next()


class AsynchronousDataAccessor:
    """Iterate over a data set in another process, which fills shared buffers.

    A tensor that you receive is a view of a buffer. It is valid until you ask for the next element;
    clone it to keep it. With ``POPTORCH_POISON_BUFFERS=1``, an outdated tensor contains NaN. All
    elements must have the shapes of the first one. Tuples arrive as lists.

    Args:
        dataset: a loader, a data set or another iterable. Its elements are tensors, or flat
            tuples, lists, dicts or registered types of tensors.
        buffer_size: number of buffers.
        miss_sleep_time_in_ms: how long the process first sleeps when all buffers are full. The
            sleeps become longer, and end when a buffer is free. With 0 it does not sleep.
        load_indefinitely: begin the next epoch immediately, instead of when you ask for it.
        early_preload: fill all buffers now; otherwise load one element now, the others at the
            first iteration.
        sharing_strategy: how the process starts and gets the data set. All but ``Fork`` pickle it
            and need a script with the guard ``if __name__ == "__main__":``.
        rebatched_size: concatenate elements to batches of this size, along dimension 0. An
            incomplete last batch is dropped unless ``rebatched_drop_last`` of the data set is
            False.

    Raises:
        poptorch.Error: the process does not get as far as the first element ("worker thread failed
            to start", with the traceback), or the data set is an asynchronous loader.
        AssertionError: an argument has an invalid value.

    Source: PopTorch user guide, "Efficient data batching".
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        batch_arrangement.check_accessor(buffer_size, miss_sleep_time_in_ms, rebatched_size)
        batch_arrangement.check_switches(
            load_indefinitely=load_indefinitely, early_preload=early_preload
        )
        if isinstance(dataset, DataLoader):
            dataset = _accessible(dataset, rebatched_size)
        self._dataset = dataset
        self._rebatched_size = rebatched_size
        settings = LoaderSettings(
            slots=buffer_size,
            pause=miss_sleep_time_in_ms / 1000,
            goes_on=load_indefinitely,
            preload=early_preload,
            rebatched=rebatched_size,
            drop_last=getattr(dataset, "rebatched_drop_last", True),
            seed=int(torch.empty((), dtype=torch.int64).random_().item()),
        )
        self._consumer = Consumer(dataset, SharingStrategy(sharing_strategy), settings)

    def terminate(self) -> None:
        """Stop the process. The accessor cannot be used afterwards.

        A process that does not stop is interrupted after 10 s, and killed after another 10 s.
        Calling it again does no harm.
        """
        self._consumer.stop()

    def __len__(self) -> int:
        """Return the number of elements of one iteration, from the data set's own length."""
        length = len(self._dataset)
        plan = self._dataset._plan if isinstance(self._dataset, DataLoader) else None
        if self._rebatched_size is None or (plan is not None and plan.rebatched is not None):
            return length
        return int(length * self._dataset.batch_size // self._rebatched_size)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Begin a new iteration.

        Elements that were loaded ahead are kept if none of them was used. In the middle of an
        iteration everything is dropped, and the data set is iterated again.

        Raises:
            AssertionError: after ``terminate``.
        """
        self._consumer.restart()
        if isinstance(self._dataset, DataLoader) and self._rebatched_size is None:
            loader_warnings.remember(self._dataset, self, self._dataset._plan)
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            AssertionError: the data set raised an error, whose traceback is in the message (you can
                begin a new iteration); the process was killed; or it was terminated.
        """
        return self._consumer.next()


class PadToSizes:
    """A ``collate_fn`` that pads sequences, so that batches have few shapes.

    With ``options.programs(len(sizes))``, each length gets its own compiled program.

    Args:
        sizes: the lengths that batches may have. A batch gets the smallest one that holds its
            longest sequence.
        fill: a number for each entry of a sample that is padded, by key or, in tuples, by index.
            Dimension 0 of the entry, a list or tensor, is the length. PyTorch collates the other
            entries.

    Raises:
        poptorch.Error: there are no sizes, one is not positive, or there is nothing to pad; when
            called, a sequence is longer than all sizes. Each is a ``ValueError``.
        KeyError, IndexError: when called, a sample lacks an entry.

    Example::

        collate = poptorch.PadToSizes([32, 64, 128], {"input_ids": 0, "labels": -100})
        loader = poptorch.DataLoader(options, samples, batch_size=8, collate_fn=collate)
    """

    def __init__(self, sizes: Sequence[int], fill: Mapping[Any, float]) -> None:
        if not sizes or min(sizes) < 1 or not fill:
            raise InvalidValue(
                "PadToSizes needs lengths and fill values",
                got=f"sizes={list(sizes)!r}, fill={dict(fill)!r}",
                where=source.calling_line(),
                fix=(
                    "for example PadToSizes([32, 64], {'input_ids': 0}); for samples that "
                    "are tuples, {0: 0}"
                ),
            )
        self._sizes = sorted(sizes)
        self._fill = dict(fill)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Pad the samples and return torch's ``default_collate`` of them."""
        parts = [{key: torch.as_tensor(sample[key]) for key in self._fill} for sample in samples]
        longest = max(len(value) for part in parts for value in part.values())
        size = next((size for size in self._sizes if size >= longest), None)
        if size is None:
            raise InvalidValue(
                "A sequence is longer than all sizes of PadToSizes",
                got=f"a length of {longest}; the sizes are {self._sizes}",
                fix=f"shorten the sequence, or add a size of at least {longest}",
            )
        padded = [{key: _pad(v, size, self._fill[key]) for key, v in p.items()} for p in parts]
        return default_collate([*map(_with, samples, padded)])


def _pad(value: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    rest = value.new_full((size - len(value), *value.shape[1:]), fill)
    return torch.cat([value, rest])


def _with(sample: Any, values: Mapping[Any, torch.Tensor]) -> Any:
    if isinstance(sample, Mapping):
        return {**sample, **values}
    return tuple(values.get(index, value) for index, value in enumerate(sample))


def _accessible(loader: DataLoader, rebatched_size: int | None) -> DataLoader:
    plan = loader._plan
    if loader._accessor is not None:
        raise Error(
            "The DataLoader already uses an AsynchronousDataAccessor",
            fix=(
                "iterate over the loader itself, or create the loader with mode=DataLoaderMode.Sync"
            ),
        )
    leaves_rest = not plan.drop_last and loader.batch_size is not None
    if leaves_rest and plan.combined != 1 and rebatched_size is None:
        raise AssertionFailure(
            "AsynchronousDataAccessor with drop_last=False only works if 'rebatched_size' is"
            " specified",
            fix="use poptorch.DataLoader(..., mode=DataLoaderMode.AsyncRebatched)",
        )
    return loader._for_another_process(type(loader))


def _started_as() -> dict[str, Any]:
    """Return how the loading process starts: in the same way as the workers of torch's loaders.

    A script therefore needs the guard for ``__main__`` exactly if it needs one for a torch loader.
    A forked process is ready 1.6 s before a server process has imported torch.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    forks = (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    return {"sharing_strategy": SharingStrategy.Fork} if forks else {}


def _check(options: Any, dataset: Any, async_options: dict[str, Any] | None) -> None:
    if options is _MISSING:
        raise InvalidType(_ORDER, got="no options", fix=_CALL)
    if dataset is _MISSING and not isinstance(options, Options):
        raise InvalidType(
            _ORDER, got=f"a {type(options).__name__} as the first argument", fix=_CALL
        )
    if not isinstance(options, Options):
        raise AssertionFailure(_ORDER, got=repr(options), fix=_CALL)
    if dataset is _MISSING:
        raise InvalidType("DataLoader takes a data set", got="options, but no data set", fix=_CALL)
    if isinstance(dataset, Iterator) and not hasattr(type(dataset), "__getitem__"):
        raise InvalidType(
            "The data set can be read only once, but every epoch reads it again",
            got=f"a {type(dataset).__name__}",
            fix=(
                "pass a list: DataLoader(options, list(samples))",
                "for data that do not fit into memory: a torch.utils.data.IterableDataset, whose "
                "__iter__ returns a new generator",
            ),
        )
    if async_options and "rebatched_size" in async_options:
        raise AssertionFailure(
            "rebatched_size must not be in async_options",
            fix="use mode=DataLoaderMode.AsyncRebatched, which assembles combined batches",
        )
