"""The data loader: counts, arguments, members and what every mode has in common."""

import functools
import inspect
import logging

import pytest
import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

from helpers.data_sets import (
    Numbers,
    Pair,
    Random,
    SizedStream,
    Stream,
    Structured,
    as_array,
    as_dict,
    as_list,
    as_nested,
    as_pair,
    as_tuple,
    doubled,
    with_number,
    with_text,
)
from helpers.leaks import descendants
from helpers.loaders import ALL_MODES, ASYNC_MODES, FORK, loader, options, values
from poptorch._base.errors import Error
from poptorch.dataloader import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.spec("data", 3)
def test_the_combined_batch_size():
    opts = options(iterations=3, replicas=4, accumulation=2, group=2)
    made = loader(Numbers(100, (5,)), 2, opts=opts)
    assert made.combinedBatchSize == 2 * 3 * (4 // 2) * 2 == 24
    assert made._plan.combined == 24
    assert made.batch_size == 24
    assert [batch.shape for batch in made] == [(24, 5)] * 4


@pytest.mark.spec("data", 2)
def test_making_a_loader_freezes_the_options_and_keeps_them():
    opts = options()
    made = loader(Numbers(4), opts=opts)
    assert made.options is opts
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    other = opts.clone()
    other.deviceIterations(2)
    assert loader(Numbers(4), opts=other).combinedBatchSize == 2


def test_options_must_be_options():
    with pytest.raises(AssertionError, match=r"takes a poptorch.Options first"):
        DataLoader({}, Numbers(4))


@pytest.mark.spec("data", 1)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_incomplete_batch_is_dropped_by_default(mode):
    made = loader(Numbers(11), 4, mode=mode)
    assert len(made) == 2
    assert values(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.spec("data", 12)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_incomplete_batch_keeps_its_size_and_place(mode, workers):
    made = loader(Numbers(11), 2, opts=options(2), mode=mode, drop_last=False, num_workers=workers)
    assert len(made) == 3
    for _ in range(2):
        assert values(made) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.spec("data", 4)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_len_needs_no_iteration_and_works_with_tqdm(mode):
    made = loader(Numbers(50), 2, opts=options(2, 3, 2), mode=mode)
    assert len(made) == 50 // (2 * 2 * 3 * 2) == 2
    with tqdm(made, disable=True) as bar:
        assert bar.total == 2
        assert [i for i, _ in enumerate(bar)] == [0, 1]


@pytest.mark.parametrize("drop_last, expected", [(True, 2), (False, 3)])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_len_of_iterable_data(mode, drop_last, expected):
    assert len(loader(SizedStream(11), 4, mode=mode, drop_last=drop_last)) == expected
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader(Stream(11), 4, mode=mode, drop_last=drop_last))


@pytest.mark.parametrize("form", [as_tuple, as_list, as_pair, as_dict, as_nested, as_array])
def test_sync_passes_any_structure_as_torch_does(form):
    data = Structured(6, form)
    expected = list(torch.utils.data.DataLoader(data, 3))
    got = list(loader(data, 3))
    assert str(got) == str(expected)
    assert type(got[0]) is type(expected[0])


def test_sync_passes_texts_and_numbers_beside_tensors():
    assert [text for _, text in loader(Structured(4, with_text), 2)] == [
        ("sample 0", "sample 1"),
        ("sample 2", "sample 3"),
    ]
    assert [number.tolist() for _, number in loader(Structured(4, with_number), 2)] == [
        [0, 1],
        [2, 3],
    ]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_collate_functions(mode):
    assert values(loader(Numbers(4), 2, mode=mode, collate_fn=doubled)) == [[0, 2], [4, 6]]


@pytest.mark.spec("data", 22)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_element_types(mode, dtype):
    data = Numbers(7, (2,), dtype)
    batches = [b.clone() for b in loader(data, 2, mode=mode, drop_last=False)]
    assert {b.dtype for b in batches} == {dtype}
    assert torch.equal(torch.cat(batches), torch.stack([data[i] for i in range(7)]))


@pytest.mark.spec("data", 18)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_batch_size_passes_items_as_they_are(mode):
    made = loader(Numbers(3, (2,)), batch_size=None, drop_last=False, mode=mode)
    assert made.combinedBatchSize is None
    assert made.options is not None
    assert len(made) == 3
    for _ in range(3):
        assert values(made) == [[0, 0], [1, 1], [2, 2]]


def test_no_batch_size_excludes_drop_last_as_in_torch():
    with pytest.raises(ValueError, match="batch_size=None"):
        loader(Numbers(3), batch_size=None)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_batch_sizes_are_positive_integers(size):
    with pytest.raises(ValueError, match="batch_size must be a positive integer"):
        loader(Numbers(3), size)


@pytest.mark.spec("data", 25)
@pytest.mark.parametrize("workers", [0, 1])
def test_workers_persist_by_default(workers):
    assert loader(Numbers(3), num_workers=workers).persistent_workers == (workers > 0)
    made = loader(Numbers(3), num_workers=workers, persistent_workers=False)
    assert not made.persistent_workers


@pytest.mark.spec("data", 24)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_terminate_any_number_of_times(mode):
    made = loader(Numbers(3), mode=mode)
    for _ in range(3):
        made.terminate()
    assert (made._accessor is None) == (mode is DataLoaderMode.Sync)
    if mode is DataLoaderMode.Sync:
        assert values(made) == [[0], [1], [2]]
    else:
        with pytest.raises(AssertionError, match="has been terminated"):
            iter(made)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterations_at_once(workers):
    made = loader(Numbers(8), 2, num_workers=workers)
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(made, made, strict=True)]
    assert pairs == [(e, e) for e in expected]
    first = iter(made)
    next(first)
    assert values(made) == expected
    assert values(first) == expected[1:]


@pytest.mark.spec("data", 5)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_breaking_off_and_beginning_again(mode, workers):
    made = loader(Numbers(12), 2, mode=mode, num_workers=workers)
    everything = [[i, i + 1] for i in range(0, 12, 2)]
    for stop in (1, 3, 6):
        assert [b.tolist() for b, _ in zip(made, range(stop), strict=False)] == everything[:stop]
        assert values(made) == everything
        assert values(made) == everything


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_shuffled_epochs_are_complete_and_differ(mode, workers):
    made = loader(Numbers(24), 4, mode=mode, num_workers=workers, shuffle=True)
    epochs = [[x for batch in made for x in batch.tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, workers",
    [(DataLoaderMode.Sync, 1), (DataLoaderMode.Async, 0), (DataLoaderMode.AsyncRebatched, 1)],
)
def test_seeds_make_runs_reproducible(mode, workers):
    def run(seed):
        torch.manual_seed(seed)
        made = loader(Random(4), 2, mode=mode, num_workers=workers, shuffle=True)
        return [value for _ in range(2) for batch in values(made) for value in batch]

    assert run(1) == run(1)
    assert len({*run(1), *run(2)}) == len(run(1)) + len(run(2))


@pytest.mark.slow
def test_a_generator_gives_the_same_order_in_every_mode():
    orders = []
    for mode in ALL_MODES:
        generator = torch.Generator().manual_seed(4)
        made = loader(Numbers(20), 4, mode=mode, shuffle=True, generator=generator)
        orders.append([values(made), values(made)])
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]


@pytest.mark.slow
@pytest.mark.spec("data", 29)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_torch_s_workers_have_their_usual_ids(mode):
    from helpers.data_sets import Workers, note_worker

    made = loader(Workers(6), 1, mode=mode, num_workers=2, worker_init_fn=note_worker)
    got = [batch[0].tolist() for batch in made]
    assert got == [[i, i % 2, i % 2] for i in range(6)]


@pytest.mark.slow
@pytest.mark.spec("data", 19)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_iterable_data_repeats_in_every_worker_and_warns(mode, caplog):
    made = loader(Stream(4), 2, mode=mode, num_workers=2)
    assert "every element will be returned 2 times" in caplog.text
    got = sorted(x for batch in values(made) for x in batch)
    assert got == [0, 0, 1, 1, 2, 2, 3, 3]
    caplog.clear()
    loader(Stream(4), 2, num_workers=2, worker_init_fn=print)
    loader(Stream(4), 2, num_workers=1)
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.spec("data", 11)
def test_the_worked_example_of_lost_samples():
    def sizes(mode, dataset, combined, **kwargs):
        made = loader(
            dataset, combined, mode=mode, num_workers=5, worker_init_fn=print_nothing, **kwargs
        )
        return [len(batch) for batch in made]

    split, mapped = Stream(53, splits=True), Numbers(53)
    sync, rebatched = DataLoaderMode.Sync, DataLoaderMode.AsyncRebatched
    for mode in (sync, DataLoaderMode.Async):
        assert sizes(mode, split, 4) == [4] * 10
    assert sizes(rebatched, split, 4) == [4] * 13
    assert all(sizes(mode, mapped, 4) == [4] * 13 for mode in ALL_MODES)
    last = sizes(sync, split, 5, drop_last=False)
    assert sorted(last) == [1, 1, 1, 1, 4] + [5] * 9
    for mode, data in ((rebatched, split), (DataLoaderMode.Async, split), (sync, mapped)):
        assert sizes(mode, data, 5, drop_last=False) == [5] * 10 + [3]


def print_nothing(worker_id):
    """Only there so that iterable data sets do not warn about missing initialisers."""


@pytest.mark.slow
@pytest.mark.spec("data", 13)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_any_worker_size_gives_the_same_samples(size):
    made = loader(
        Numbers(20), 3, opts=options(2), mode=DataLoaderMode.AsyncRebatched,
        rebatched_worker_size=size, num_workers=2,
    )  # fmt: skip
    assert (made.batch_size, made.combinedBatchSize, len(made)) == (size, 6, 3)
    assert values(made) == [list(range(i, i + 6)) for i in (0, 6, 12)]


@pytest.mark.slow
@pytest.mark.spec("data", 26)
@pytest.mark.parametrize(
    "async_options",
    [
        {},
        {"buffer_size": 1},
        {"buffer_size": 10, "early_preload": True},
        {"load_indefinitely": False, "miss_sleep_time_in_ms": 0},
    ],
)
@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_options_of_the_loading_process(mode, async_options):
    made = loader(Numbers(9), 2, mode=mode, async_options=async_options)
    for _ in range(3):
        assert values(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_arguments_that_exclude_one_another():
    with pytest.raises(AssertionError, match="rebatched_size must not be in async_options"):
        loader(Numbers(3), mode=DataLoaderMode.Async, async_options={"rebatched_size": 2})
    with pytest.raises(
        AssertionError, match=r"rebatched_worker_size must not be larger.*\n.*5 > 4"
    ):
        loader(Numbers(9), 4, mode=DataLoaderMode.AsyncRebatched, rebatched_worker_size=5)
    with pytest.raises(ValueError, match="prefetch_factor"):
        loader(Numbers(3), prefetch_factor=2)
    with pytest.raises(TypeError, match="unknown"):
        loader(Numbers(3), unknown=2)


def test_a_loader_that_could_not_be_made_is_collected_silently():
    broken = object.__new__(DataLoader)
    del broken


def test_samples_that_are_left_out_are_told(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    loader(Numbers(12), 4)
    assert caplog.text == ""
    loader(Numbers(11), 4)
    assert caplog.records[0].levelname == "INFO"
    assert "3 of the data set's 11 samples are left out" in caplog.text
    caplog.clear()
    loader(Numbers(3), 4)
    assert caplog.records[0].levelname == "WARNING"
    assert "No batch will be loaded: the data set has 3 samples" in caplog.text
    caplog.clear()
    loader(Numbers(11), 4, drop_last=False)
    assert caplog.records[0].levelname == "WARNING"
    assert "the last batch of this process has 3 samples" in caplog.text
    caplog.clear()
    loader(Numbers(11), 4, sampler=range(8))
    assert caplog.text == ""


def test_a_short_last_batch_is_no_warning_where_another_program_takes_it(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    for accumulation, samples, level, text in (
        (1, 11, "INFO", "3 samples, for which options.programs(2) allows a program"),
        (2, 22, "INFO", "6 samples, for which options.programs(2) allows a program"),
        (2, 21, "WARNING", "5 samples. options.programs(2) lets a model be compiled for that"),
    ):
        own = options(accumulation=accumulation)
        own.programs(2)
        loader(Numbers(samples), 4, opts=own, drop_last=False)
        (record,) = caplog.records
        assert record.levelname == level
        assert text in record.getMessage()
        caplog.clear()


@pytest.mark.spec("data", 27)
def test_loaders_rely_on_the_length():
    class Careless(Numbers):
        def __getitem__(self, index):
            if index >= self.size:
                raise StopIteration
            return torch.tensor(float(index))

    assert len(list(Careless(3))) == 3  # plain iteration ends there
    assert values(loader(Careless(3))) == [[0], [1], [2]]


class Mixin:
    def __init__(self, *args, extra=0, **kwargs):
        self.extra = extra
        super().__init__(*args, **kwargs)


class Subclass(Mixin, DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch + self.extra


@pytest.mark.slow
@pytest.mark.spec("programs", 20)
def test_subclasses_with_mix_ins():
    made = Subclass(options(2), Numbers(4), extra=10)
    assert values(made) == [[10, 11], [12, 13]]
    made = Subclass(options(2), Numbers(4), mode=DataLoaderMode.Async, extra=10, async_options=FORK)
    assert values(made) == [[10, 11], [12, 13]]


def test_torch_s_loader_may_be_replaced_by_this_one(monkeypatch):
    with_options = functools.partialmethod(DataLoader.__init__, options(2))
    monkeypatch.setattr(DataLoader, "__init__", with_options)
    monkeypatch.setattr(torch.utils.data, "DataLoader", DataLoader)
    made = torch.utils.data.DataLoader(Numbers(4), batch_size=1)
    assert values(made) == [[0, 1], [2, 3]]


def test_the_signature_is_poptorch_s():
    names = list(inspect.signature(DataLoader.__init__).parameters)
    assert names == [
        "self", "options", "dataset", "batch_size", "shuffle", "num_workers", "drop_last",
        "persistent_workers", "auto_distributed_partitioning", "mode", "async_options",
        "rebatched_worker_size", "batch_sampler", "kwargs",
    ]  # fmt: skip
    assert issubclass(DataLoader, torch.utils.data.DataLoader)


def test_a_tensor_data_set_gives_lists_as_in_torch():
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    expected = list(torch.utils.data.DataLoader(data, 2))
    got = list(loader(data, 2))
    assert str(got) == str(expected)
    assert type(got[0]) is list
    assert type(loader(Structured(2, as_pair), 2).__iter__().__next__()) is Pair


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_data_set_pass_as_they_are_and_the_loader_goes_on(workers):
    from helpers.data_sets import Broken

    data, before = Broken(6, 3), descendants().keys()
    made = loader(data, 2, num_workers=workers)
    with pytest.raises(KeyError, match="sample 3 cannot be read"):
        list(made)
    workers_then = descendants().keys() - before
    for _ in range(2):
        with pytest.raises(KeyError, match="sample 3 cannot be read"):
            list(made)
    data.is_broken.zero_()
    assert values(made) == [[0, 1], [2, 3], [4, 5]]
    assert descendants().keys() - before == workers_then
    assert len(workers_then) == workers


@pytest.mark.slow
def test_a_newer_iterator_over_one_loading_process_ends_the_older_one():
    made = loader(Numbers(8), 2, mode=DataLoaderMode.Async)
    first, second = iter(made), iter(made)
    with pytest.raises(Error, match="newer iterator"):
        next(first)
    assert values(second) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_type_that_is_no_number_is_refused_before_a_process_starts():
    for name, value in (("buffer_size", 2.5), ("miss_sleep_time_in_ms", "1"), ("buffer_size", "3")):
        with pytest.raises(AssertionError, match=f"{name} must be at least"):
            AsynchronousDataAccessor(Numbers(4), **{**FORK, name: value})
    with pytest.raises(TypeError, match="early_preload must be True or False"):
        AsynchronousDataAccessor(Numbers(4), **FORK, early_preload="no")


def test_a_stream_that_is_too_short_for_a_batch_is_said(caplog):
    opts = options(iterations=4)
    assert list(DataLoader(opts, Stream(3))) == []
    assert caplog.text.count("ended before the 4 samples of one combined batch") == 1
    caplog.clear()
    assert len(list(DataLoader(opts, Stream(9)))) == 2
    assert "ended before" not in caplog.text
