"""The data loader: every mode yields the same batches; counts, arguments and members."""

import functools
import inspect
import logging
import traceback

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset
from tqdm import tqdm

import poptorch
from helpers import data_sets as sets
from helpers.cases import few
from helpers.leaks import descendants
from helpers.loaders import ALL_MODES, FORK, loader, options, values
from helpers.wrapping import options as quick
from poptorch._base.errors import Error
from poptorch.dataloader import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode


def runs(end: int, size: int) -> list[list[int]]:
    return [list(range(at, min(at + size, end))) for at in range(0, end, size)]


def asynchronous(**settings):
    return {"async_options": settings, "mode": DataLoaderMode.Async}


# A data set, arguments, torch's workers, and the batches of every mode.
CASES = {
    "the rest is dropped": (sets.Numbers(11),
                            {"batch_size": 4, **asynchronous(buffer_size=10, early_preload=True)},
                            (0,), runs(8, 4)),
    "the rest keeps its size and place": (
        sets.Numbers(11), {"batch_size": 2, "opts": (2,), "drop_last": False}, (0, 2), runs(11, 4)),
    "iterations, replicas, accumulation": (
        sets.Numbers(50), {"batch_size": 2, "opts": (2, 3, 2)}, (0,), runs(48, 24)),
    "groups of replicas": (sets.Numbers(50), {"batch_size": 2, "opts": (3, 4, 2, 2)}, (0,),
                           runs(48, 24)),
    "items as they are": (sets.Numbers(3, (2,)), {"batch_size": None, "drop_last": False}, (0,),
                          [[0, 0], [1, 1], [2, 2]]),
    "a collate function": (sets.Numbers(4),
                           {"batch_size": 2, "collate_fn": lambda items: 2 * torch.stack(items)},
                           (0,), [[0, 2], [4, 6]]),
    "a stream": (
        sets.SizedStream(11),
        {"batch_size": 4, **asynchronous(load_indefinitely=False, miss_sleep_time_in_ms=0)}, (0,),
        runs(8, 4)),
    "the rest of a stream": (sets.SizedStream(11), {"batch_size": 4, "drop_last": False}, (0,),
                             runs(11, 4)),
}  # fmt: skip


@pytest.mark.spec("data", 1, 3, 4, 5, 12, 18, 26)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(
    "name, workers", [(name, workers) for name, case in CASES.items() for workers in case[2]]
)
def test_every_mode_yields_the_same_again_and_again(name, workers, mode):
    dataset, arguments, _, expected = CASES[name]
    opts = options(*arguments.get("opts", ()))
    made = loader(dataset, num_workers=workers, **{**arguments, "opts": opts, "mode": mode})
    assert made.options is opts
    assert made.combinedBatchSize == (arguments["batch_size"] and len(expected[0]))
    assert made.persistent_workers == (workers > 0)
    assert len(made) == len(expected)
    for stop in (len(expected), 1, len(expected) - 1):  # to the end, or broken off
        seen = [b.flatten().tolist() for b, _ in zip(made, range(stop), strict=False)]
        assert seen == expected[:stop]
    for _ in range(2):
        assert values(made) == expected
    with tqdm(made, disable=True) as bar:
        assert bar.total == len(expected)
    for _ in range(3):
        made.terminate()


@pytest.mark.spec("data", 24)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_after_the_end(mode):
    made = loader(sets.Numbers(3), mode=mode)
    made.terminate()
    if mode is DataLoaderMode.Sync:
        assert values(made) == [[0], [1], [2]]
    else:
        with pytest.raises(AssertionError, match="has been terminated"):
            iter(made)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader(sets.Stream(11), 4, mode=mode))


@pytest.mark.spec("data", 2)
def test_making_a_loader_freezes_the_options():
    opts = options()
    loader(sets.Numbers(4), opts=opts)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    other = opts.clone()
    other.deviceIterations(2)
    assert loader(sets.Numbers(4), opts=other).combinedBatchSize == 2


@pytest.mark.spec("data", 22)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_element_types(mode):
    data = sets.Structured(7, "all types")
    batches = [[t.clone() for t in batch] for batch in loader(data, 2, mode=mode, drop_last=False)]
    for at, dtype in enumerate(sets.DTYPES):
        got = torch.cat([batch[at] for batch in batches])
        assert got.dtype is dtype
        assert torch.equal(got, torch.arange(7).to(dtype))


def test_a_newer_iterator_over_one_loading_process_ends_the_older_one():
    made = loader(sets.Numbers(8), 2, mode=DataLoaderMode.Async)
    first, second = iter(made), iter(made)
    with pytest.raises(Error, match="newer iterator"):
        next(first)
    assert values(second) == runs(8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_epochs_are_complete_differ_and_follow_a_generator(workers):
    orders = []
    for mode in ALL_MODES:
        data, order = sets.Numbers(24), torch.Generator().manual_seed(4)
        made = loader(data, 4, mode=mode, num_workers=workers, shuffle=True, generator=order)
        orders.append([[x for batch in values(made) for x in batch] for _ in range(3)])
    assert all(sorted(epoch) == list(range(24)) for epoch in orders[0])
    assert len({tuple(epoch) for epoch in orders[0]}) == 3
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.AsyncRebatched])
def test_seeds_make_runs_reproducible(mode):
    def run(seed):
        torch.manual_seed(seed)
        made = loader(sets.Random(4), 2, mode=mode, num_workers=1, shuffle=True)
        return [value for _ in range(2) for batch in values(made) for value in batch]

    assert run(1) == run(1)
    assert len({*run(1), *run(2)}) == len(run(1)) + len(run(2))


@pytest.mark.slow
@pytest.mark.spec("data", 19, 25, 29)
@pytest.mark.parametrize("mode", few(ALL_MODES, DataLoaderMode.Async))
def test_torch_s_workers(mode, caplog):
    """They have their usual ids; iterable data repeats in every one, which warns."""
    own = {"worker_init_fn": sets.note_worker, "persistent_workers": False}
    made = loader(sets.Workers(6), 1, mode=mode, num_workers=2, **own)
    assert not made.persistent_workers
    assert [batch[0].tolist() for batch in made] == [[i, i % 2, i % 2] for i in range(6)]
    made = loader(sets.Stream(4), 2, mode=mode, num_workers=2)
    assert "every element will be returned 2 times" in caplog.text
    assert sorted(x for batch in values(made) for x in batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    caplog.clear()
    loader(sets.Stream(4), 2, num_workers=2, worker_init_fn=print)
    loader(sets.Stream(4), 2, num_workers=1)
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.spec("data", 11)
def test_the_worked_example_of_lost_samples():
    def sizes(mode, dataset, *size, **more):
        workers = {"num_workers": 5, "worker_init_fn": sets.note_worker}
        return [len(batch) for batch in loader(dataset, *size, mode=mode, **workers, **more)]

    split, rebatched = sets.Stream(53, splits=True), DataLoaderMode.AsyncRebatched
    assert sizes(DataLoaderMode.Sync, split, 4) == [4] * 10
    assert sizes(rebatched, split, 4) == [4] * 13
    last = sizes(DataLoaderMode.Sync, split, 5, drop_last=False)
    assert sorted(last) == [1, 1, 1, 1, 4] + [5] * 9
    assert sizes(DataLoaderMode.Async, split, 5, drop_last=False) == [5] * 10 + [3]


@pytest.mark.parametrize("error, title, cases", [
    (ValueError, "batch_size must be a positive", [{"batch_size": n} for n in (0, 1.5, True)]),
    (ValueError, "batch_size=None", [{"batch_size": None}]),  # and drop_last, as in torch
    (AssertionError, "rebatched_size must not be in", [asynchronous(rebatched_size=2)]),
    (AssertionError, r"rebatched_worker_size must not be larger.*\n.*5 > 4",
     [{"batch_size": 4, "mode": DataLoaderMode.AsyncRebatched, "rebatched_worker_size": 5}]),
    (ValueError, "prefetch_factor", [{"prefetch_factor": 2}]),
    (TypeError, "unknown", [{"unknown": 2}]),
    (AssertionError, "buffer_size must be at least 1",
     [asynchronous(buffer_size=size) for size in (2.5, "3", 0)]),
    (AssertionError, "miss_sleep_time_in_ms must be at least 0",
     [asynchronous(miss_sleep_time_in_ms=time) for time in ("1", -1)]),
    (TypeError, "early_preload must be True or False", [asynchronous(early_preload="no")]),
    (TypeError, "shuffle must be True or False", [{"shuffle": "no"}]),
])  # fmt: skip
def test_arguments_that_make_no_sense(error, title, cases):
    for arguments in cases:
        with pytest.raises(error, match=title):
            loader(sets.Numbers(9), **arguments)


def test_arguments_of_the_accessor_that_make_no_sense():
    for size in (1, "2"):
        with pytest.raises(AssertionError, match="rebatched_size must be at least 2"):
            AsynchronousDataAccessor(sets.Numbers(4), **FORK, rebatched_size=size)
    with pytest.raises(ValueError, match="SharingStrategy"):
        AsynchronousDataAccessor(sets.Numbers(3), sharing_strategy=17)
    with pytest.raises(AssertionError, match=r"takes a poptorch.Options first"):
        DataLoader({}, sets.Numbers(4))


@pytest.mark.parametrize("samples, arguments, level, text", [
    (12, {}, None, ""),
    (11, {}, "INFO", "3 of the data set's 11 samples are left out"),
    (3, {}, "WARNING", "No batch will be loaded: the data set has 3 samples"),
    (11, {"drop_last": False}, "WARNING", "the last batch of this process has 3 samples"),
    (11, {"sampler": range(8)}, None, ""),
    # Where another program takes the rest, its size matters.
    (11, {"programs": (1, 2), "drop_last": False}, "INFO",
     "3 samples, for which options.programs(2) allows a program"),
    (22, {"programs": (2, 2), "drop_last": False}, "INFO",
     "6 samples, for which options.programs(2) allows a program"),
    (21, {"programs": (2, 2), "drop_last": False}, "WARNING",
     "5 samples. options.programs(2) lets a model be compiled for that"),
])  # fmt: skip
def test_samples_that_are_left_out_are_told(samples, arguments, level, text, caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    accumulation, programs = arguments.pop("programs", (1, 1))
    opts = options(accumulation=accumulation)
    opts.programs(programs)
    loader(sets.Numbers(samples), 4, opts=opts, **arguments)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert text in caplog.text


def test_arguments_of_another_mode_and_streams_too_short_for_a_batch_are_said(caplog):
    loader(sets.Numbers(4), 2, async_options={"buffer_size": 3}, rebatched_worker_size=1)
    assert "no effect in mode Sync: async_options, rebatched_worker_size" in caplog.text
    loader(sets.Numbers(4), 2, mode=DataLoaderMode.Async, pin_memory=True)
    assert "no effect in an asynchronous mode: pin_memory" in caplog.text
    opts = options(iterations=4)
    assert list(DataLoader(opts, sets.Stream(3))) == []
    assert caplog.text.count("ended before the 4 samples of one combined batch") == 1
    caplog.clear()
    assert len(list(DataLoader(opts, sets.Stream(9)))) == 2
    assert "ended before" not in caplog.text


@pytest.mark.spec("data", 27)
def test_loaders_rely_on_the_length():
    class Careless(sets.Unfinished):
        def __len__(self):
            return self.size

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
    for more in ({}, {"mode": DataLoaderMode.Async, "async_options": FORK}):
        made = Subclass(options(2), sets.Numbers(4), extra=10, **more)
        assert values(made) == [[10, 11], [12, 13]]


def test_torch_s_loader_may_be_replaced_by_this_one(monkeypatch):
    with_options = functools.partialmethod(DataLoader.__init__, options(2))
    monkeypatch.setattr(DataLoader, "__init__", with_options)
    monkeypatch.setattr(torch.utils.data, "DataLoader", DataLoader)
    assert values(torch.utils.data.DataLoader(sets.Numbers(4), batch_size=1)) == [[0, 1], [2, 3]]


def test_the_signature_is_poptorch_s():
    assert list(inspect.signature(DataLoader.__init__).parameters) == [
        "self", "options", "dataset", "batch_size", "shuffle", "num_workers", "drop_last",
        "persistent_workers", "auto_distributed_partitioning", "mode", "async_options",
        "rebatched_worker_size", "batch_sampler", "kwargs",
    ]  # fmt: skip
    assert issubclass(DataLoader, torch.utils.data.DataLoader)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_data_set_pass_as_they_are_and_the_loader_goes_on(workers):
    data, before = sets.Acting(6, 3, sets.cannot_be_read), descendants().keys()
    made = loader(data, 2, num_workers=workers)
    for attempt in range(3):
        with pytest.raises(KeyError, match="sample 3 cannot be read") as caught:
            list(made)
        traceback.clear_frames(caught.tb)  # its iterator would keep torch's workers
        if attempt == 0:
            workers_then = descendants().keys() - before
    data.acts.zero_()
    assert values(made) == [[0, 1], [2, 3], [4, 5]]
    assert descendants().keys() - before == workers_then
    assert len(workers_then) == workers
    del made, caught  # whose cycle would keep the workers


APART = torch.rand(23, 4).t().contiguous().t()  # whose rows are not contiguous
TENSORS = TensorDataset(torch.rand(23, 3), torch.arange(23), torch.rand(23, 2, 2).half(), APART)


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return [2 * t for t in super().__getitem__(index)]


def torch_s(dataset, **arguments):
    if not arguments.get("batch_sampler"):
        arguments.setdefault("drop_last", True)
    return torch.utils.data.DataLoader(dataset, **arguments)


@pytest.mark.parametrize("dataset, arguments", [
    *((TENSORS, {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last})
      for size in (4, 30) for shuffle in (True, False) for drop_last in (True, False)),
    (TENSORS, {"batch_size": 4, "shuffle": True, "generator": 5}),
    (TENSORS, {"batch_sampler": BatchSampler(SequentialSampler(TENSORS), 4, False)}),
    (TENSORS, {"batch_sampler": BatchSampler(RandomSampler(TENSORS), 4, False)}),
    (TENSORS, {"sampler": [3, 22, 2]}), (TENSORS, {"batch_sampler": [[3, 20], [2]]}),
    (TENSORS, {"batch_size": None, "drop_last": False}),
    (Augmented(*TENSORS.tensors), {"batch_size": 2}),
])  # fmt: skip
def test_tensor_data_sets_give_torch_s_batches_over_several_epochs(dataset, arguments):
    def epochs(make):
        torch.manual_seed(3)
        own = dict(arguments)
        if "generator" in own:
            own["generator"] = torch.Generator().manual_seed(own["generator"])
        made = make(dataset, **own)
        batches = [batch for _ in range(3) for batch in made]
        return batches, torch.rand(2)  # the same draws from torch's generator

    (got, after), (expected, wanted_after) = epochs(loader), epochs(torch_s)
    assert torch.equal(after, wanted_after)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert [type(batch) for batch in got] == [type(batch) for batch in expected]


def test_batches_are_the_caller_s_own():
    before = TENSORS.tensors[0].clone()
    for batch in loader(TENSORS, 5):
        batch[0].zero_()
    assert torch.equal(TENSORS.tensors[0], before)
    assert next(iter(loader(TensorDataset(torch.ones(4, requires_grad=True)), 2)))[0].requires_grad


PADDED = [
    {"tokens": list(range(1, count + 1)), "labels": torch.full((count,), 7), "kind": count % 2}
    for count in (2, 3, 4, 6)
]
FILL = {"tokens": 0, "labels": -100}


def test_a_batch_gets_the_smallest_size_that_holds_it_tuples_too() -> None:
    collate = poptorch.PadToSizes([8, 4], FILL)
    short, long = collate(PADDED[:2]), collate(PADDED[2:])
    assert short["tokens"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert short["labels"].tolist() == [[7, 7, -100, -100], [7, 7, 7, -100]]
    assert (short["kind"].tolist(), long["tokens"].shape) == ([0, 1], (2, 8))
    assert PADDED[0]["tokens"] == [1, 2]
    samples = [(torch.ones(count, 3), count) for count in (1, 2)]
    frames, counts = poptorch.PadToSizes([4], {0: -1})(samples)
    assert (frames.shape, frames[0, 0].tolist()) == ((2, 4, 3), [1, 1, 1])
    assert (frames[0, 1:].unique().tolist(), counts.tolist()) == ([-1], [1, 2])


def test_a_program_for_each_size() -> None:
    chosen = quick().programs(2)
    collate = poptorch.PadToSizes([4, 8], FILL)
    batches = poptorch.DataLoader(chosen, PADDED, batch_size=2, collate_fn=collate)
    wrapper = poptorch.inferenceModel(
        lambda tokens, labels, kind: (tokens.sum(1) + kind, labels.ne(-100).sum(1)), chosen
    )
    sums, counts = zip(*(wrapper(**batch) for batch in batches), strict=True)
    assert torch.cat(sums).tolist() == [3, 7, 10, 21]
    assert torch.cat(counts).tolist() == [2, 3, 4, 6]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"longer than all sizes(?s:.)*6; sizes \[4\]"):
        poptorch.PadToSizes([4], FILL)(PADDED)
    for sizes, fill in (([], FILL), ([0], FILL), ([4], {})):
        with pytest.raises(poptorch.Error, match="needs lengths and what to pad"):
            poptorch.PadToSizes(sizes, fill)
