"""Every sample exactly once per epoch, minus the documented remainder, in any combination."""

import itertools
import random

import pytest

from helpers.cases import few
from helpers.data_sets import Numbers
from helpers.loaders import loader, options
from poptorch.enums import DataLoaderMode

pytestmark = pytest.mark.slow


def parts_of(size, combined, processes, drop_last):
    """Return the samples that each process reads, in the order without shuffling."""
    each, more = divmod(size, processes)
    ends = list(itertools.accumulate([0, *(each + (p < more) for p in range(processes))]))
    if drop_last:
        ends = [p * combined * (size // (combined * processes)) for p in range(processes + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def draw(rng):
    """Return counts and settings; sizes go up to some combined batches of all processes."""
    replicas, processes = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 3])
    group = rng.choice([group for group in (1, 2, 4) if replicas % group == 0])
    batch, iterations, accumulation = rng.randint(1, 4), rng.randint(1, 3), rng.choice([1, 1, 2])
    combined = batch * iterations * (replicas // group) * accumulation
    size = rng.randint(1, 4 * combined * processes + 2)
    settings = {
        "num_workers": rng.choice([0, 0, 1, 2]), "drop_last": rng.random() < 0.5,
        "shuffle": rng.random() < 0.5, "mode": rng.choice(list(DataLoaderMode)),
    }  # fmt: skip
    parts = parts_of(size, combined, processes, settings["drop_last"])
    if not all(parts):  # an asynchronous loader needs a first element
        settings["mode"] = DataLoaderMode.Sync
    if settings["mode"] is DataLoaderMode.AsyncRebatched:
        settings["rebatched_worker_size"] = min(rng.randint(1, 8), combined)
    return (iterations, replicas, accumulation, group), batch, size, combined, parts, settings


def check(case):
    counts, batch, size, combined, parts, settings = case
    read = [[], []]
    for process, part in enumerate(parts):
        opts = options(*counts, process=process, processes=len(parts), seed=size)
        made = loader(Numbers(size), batch, opts=opts, **settings)
        expected = [part[at : at + combined] for at in range(0, len(part), combined)]
        assert len(made) == len(expected)
        for samples in read:
            epoch = [each.tolist() for each in made]
            assert settings["shuffle"] or epoch == expected
            assert [len(each) for each in epoch] == [len(each) for each in expected]
            samples.extend(x for each in epoch for x in each)
        made.terminate()
    for samples in read:
        assert len(samples) == len(set(samples))
        assert set(samples) <= set(range(size))


@pytest.mark.spec("data", 4, 12, 13, 14)
@pytest.mark.spec("parallel", 40)
@pytest.mark.parametrize("seed", few(range(5), 0, 2))
def test_every_sample_once(seed):
    rng = random.Random(seed)
    for _ in range(8):
        case = draw(rng)
        try:
            check(case)
        except BaseException as error:
            error.add_note(str(case))
            raise
