"""Every sample exactly once per epoch, minus the documented remainder, in any combination."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest

from helpers.data_sets import Numbers, Stream
from helpers.loaders import loader, options
from poptorch._base.errors import Error
from poptorch.enums import DataLoaderMode

pytestmark = pytest.mark.slow

COMBINATIONS = 40  # in five parts


@dataclass(frozen=True)
class Case:
    """One loader per process over ``size`` samples."""

    size: int
    batch: int
    iterations: int
    replicas: int
    group: int
    accumulation: int
    processes: int
    workers: int
    worker_batch: int
    mode: DataLoaderMode
    drop_last: bool
    shuffle: bool
    is_stream: bool

    @property
    def combined(self):
        return self.batch * self.iterations * (self.replicas // self.group) * self.accumulation

    @property
    def may_be_empty(self):
        """Whether some process, or some worker of a stream, gets less than one batch."""
        if self.is_stream:
            return self.drop_last and self.size < self.combined * max(self.workers, 1)
        return not all(expected_parts(self))

    def loader(self, process):
        opts = options(
            self.iterations, self.replicas, self.accumulation, self.group,
            process=process, processes=self.processes, seed=self.size,
        )  # fmt: skip
        kwargs = {"num_workers": self.workers, "drop_last": self.drop_last}
        if self.mode is DataLoaderMode.AsyncRebatched:
            kwargs["rebatched_worker_size"] = min(self.worker_batch, self.combined)
        if self.is_stream:
            data, kwargs["worker_init_fn"] = Stream(self.size, splits=True), nothing
        else:
            data, kwargs["shuffle"] = Numbers(self.size), self.shuffle
        return loader(data, self.batch, opts=opts, mode=self.mode, **kwargs)


def nothing(worker_id):
    """Keep iterable data sets from warning that nobody splits them."""


def random_case(rng):
    """Return a case; sizes go up to some combined batches of all processes, and a bit."""
    replicas, is_stream = rng.choice([1, 1, 2, 4]), rng.random() < 0.2
    case = Case(
        size=0,
        batch=rng.randint(1, 4),
        iterations=rng.randint(1, 3),
        replicas=replicas,
        group=rng.choice([group for group in (1, 2, 4) if replicas % group == 0]),
        accumulation=rng.choice([1, 1, 2]),
        processes=1 if is_stream else rng.choice([1, 1, 2, 3]),
        workers=rng.choice([0, 0, 1, 2]),
        worker_batch=rng.randint(1, 8),
        mode=rng.choice(list(DataLoaderMode)),
        drop_last=rng.random() < 0.5,
        shuffle=not is_stream and rng.random() < 0.5,
        is_stream=is_stream,
    )
    return replace(case, size=rng.randint(1, 4 * case.combined * case.processes + 2))


def epochs(case, process, count):
    """Return the batches of some epochs of one process, as lists of numbers."""
    made = case.loader(process)
    got = [[batch.tolist() for batch in made] for _ in range(count)]
    if not case.is_stream:
        assert [len(epoch) for epoch in got] == [len(made)] * count
    made.terminate()
    return got


def expected_parts(case):
    """Return the samples that each process reads, in the order without shuffling."""
    whole = case.combined * case.processes
    if case.drop_last:
        each = case.size // whole * case.combined
        return [list(range(p * each, (p + 1) * each)) for p in range(case.processes)]
    short, extra = divmod(case.size, case.processes)
    ends = [0]
    for process in range(case.processes):
        ends.append(ends[-1] + short + (process < extra))
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def check_map_style(case, per_process):
    parts = expected_parts(case)
    for at in range(2):
        flat = [[x for batch in mine[at] for x in batch] for mine in per_process]
        if not case.shuffle:
            assert flat == parts
        assert [len(f) for f in flat] == [len(p) for p in parts]
        union = [x for f in flat for x in f]
        assert len(union) == len(set(union))
        assert set(union) <= set(range(case.size))
        for mine in per_process:
            sizes = [len(batch) for batch in mine[at]]
            assert all(size == case.combined for size in sizes[:-1])
            assert sizes[-1:] == [] or case.drop_last <= (sizes[-1] == case.combined)


def check_stream(case, epoch):
    """Each worker drops its own remainder in Sync and Async, the whole is rebatched otherwise."""
    flat = [x for batch in epoch for x in batch]
    assert len(flat) == len(set(flat))
    assert set(flat) <= set(range(case.size))
    if not case.drop_last:
        assert len(flat) == case.size
    elif case.mode is DataLoaderMode.AsyncRebatched:
        assert len(flat) == case.size // case.combined * case.combined
    else:
        assert case.size - len(flat) <= (case.combined - 1) * max(case.workers, 1)
    if case.workers < 2:
        assert flat == list(range(len(flat)))


def check(case):
    try:
        per_process = [epochs(case, process, 2) for process in range(case.processes)]
    except Error as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        # An asynchronous loader cannot lay out its buffers without a first element.
        assert "The Dataset is empty" in refused
        assert case.mode is not DataLoaderMode.Sync
        assert case.may_be_empty
    elif case.is_stream:
        for epoch in per_process[0]:
            check_stream(case, epoch)
    else:
        check_map_style(case, per_process)


@pytest.mark.spec("data", 11, 12, 13, 14)
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_once(seed):
    rng = random.Random(seed)
    for _ in range(COMBINATIONS // 5):
        case = random_case(rng)
        try:
            check(case)
        except BaseException as error:
            error.add_note(str(case))
            raise
