"""The data loader: every mode yields the same batches; arguments; how it divides its data."""

import functools
import inspect
import itertools
import logging
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)
from tqdm import tqdm

import poptorch
from helpers import data_sets as sets
from helpers.cases import few
from helpers.leaks import descendants
from helpers.loaders import ALL_MODES, FORK, loader, options, values
from helpers.patience import eventually
from helpers.wrapping import options as quick
from poptorch import _job
from poptorch._base.errors import Error
from poptorch.argparsers import registerCustomArgParser
from poptorch.dataloader import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode


def runs(end: int, size: int) -> list[list[int]]:
    return [list(range(at, min(at + size, end))) for at in range(0, end, size)]


def asynchronous(**settings: Any) -> Any:
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
def test_every_mode_yields_the_same_again_and_again(
    name: str, workers: int, mode: DataLoaderMode
) -> None:
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
def test_a_terminated_asynchronous_loader_refuses_to_iterate(mode: DataLoaderMode) -> None:
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
def test_making_a_loader_freezes_the_options() -> None:
    opts = options()
    loader(sets.Numbers(4), opts=opts)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    other = opts.clone()
    other.deviceIterations(2)
    assert loader(sets.Numbers(4), opts=other).combinedBatchSize == 2


@pytest.mark.spec("data", 22)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_batches_have_the_types_of_the_elements(mode: DataLoaderMode) -> None:
    data = sets.Structured(7, "all types")
    batches = [[t.clone() for t in batch] for batch in loader(data, 2, mode=mode, drop_last=False)]
    for at, dtype in enumerate(sets.DTYPES):
        got = torch.cat([batch[at] for batch in batches])
        assert got.dtype is dtype
        assert torch.equal(got, torch.arange(7).to(dtype))


def test_a_newer_iterator_over_the_same_loading_process_ends_the_older_one() -> None:
    made = loader(sets.Numbers(8), 2, mode=DataLoaderMode.Async)
    first, second = iter(made), iter(made)
    with pytest.raises(Error, match="newer iterator"):
        next(first)
    assert values(second) == runs(8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_epochs_are_complete_differ_and_follow_a_generator(workers: int) -> None:
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
def test_seeds_make_runs_reproducible(mode: DataLoaderMode) -> None:
    def run(seed: int) -> list[float]:
        torch.manual_seed(seed)
        made = loader(sets.Random(4), 2, mode=mode, num_workers=1, shuffle=True)
        return [value for _ in range(2) for batch in values(made) for value in batch]

    assert run(1) == run(1)
    assert len({*run(1), *run(2)}) == len(run(1)) + len(run(2))


def share_of_worker() -> slice:
    worker = torch.utils.data.get_worker_info()
    return slice(None) if worker is None else slice(worker.id, None, worker.num_workers)


class Dividing(sets.Repeating):
    def __iter__(self) -> Iterator[Any]:
        yield from [*super().__iter__()][share_of_worker()]


class DividingInside(sets.Repeating):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor(n) for n in range(4) for _ in [get_worker_info()]])


class Holding(sets.Repeating):
    def __init__(self, inner: sets.Repeating) -> None:
        super().__init__(4)
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


SELF_DIVIDING = [
    Dividing(4),
    DividingInside(4),
    Holding(Dividing(4)),
    Holding(Holding(Dividing(4))),
]


@pytest.mark.parametrize("dataset", SELF_DIVIDING, ids=lambda each: type(each).__name__)
def test_data_sets_that_ask_for_their_worker_cause_no_warning(
    dataset: Dividing | DividingInside | Holding, caplog: pytest.LogCaptureFixture
) -> None:
    loader(dataset, 2, num_workers=2)
    assert caplog.text == ""


def test_data_sets_that_contain_others_that_do_not_ask_cause_the_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader(Holding(sets.Repeating(4)), 2, num_workers=2)
    assert "Every element is returned 2 times" in caplog.text


@pytest.mark.slow
@pytest.mark.spec("data", 19, 25, 29)
@pytest.mark.parametrize("mode", few(ALL_MODES, DataLoaderMode.Async))
def test_torch_s_workers(mode: DataLoaderMode, caplog: pytest.LogCaptureFixture) -> None:
    """Workers have their usual ids. Iterable data repeats in every worker, with a warning."""
    own = {"worker_init_fn": sets.note_worker, "persistent_workers": False}
    made = loader(sets.Workers(6), 1, mode=mode, num_workers=2, **own)
    assert not made.persistent_workers
    assert [batch[0].tolist() for batch in made] == [[i, i % 2, i % 2] for i in range(6)]
    made = loader(sets.Repeating(4), 2, mode=mode, num_workers=2)
    assert "Every element is returned 2 times" in caplog.text
    assert sorted(x for batch in values(made) for x in batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    caplog.clear()
    loader(sets.Repeating(4), 2, num_workers=2, worker_init_fn=print)
    loader(sets.Repeating(4), 2, num_workers=1)
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.spec("data", 11)
def test_the_worked_example_of_lost_samples() -> None:
    def sizes(mode: DataLoaderMode, dataset: sets.Stream, *size: Any, **more: Any) -> list[int]:
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
def test_impossible_arguments_of_a_loader_are_refused(
    error: type, title: str, cases: list[dict[str, Any]]
) -> None:
    for arguments in cases:
        with pytest.raises(error, match=title):
            loader(sets.Numbers(9), **arguments)


def test_impossible_arguments_of_an_accessor_are_refused() -> None:
    for size in (1, "2"):
        with pytest.raises(AssertionError, match="rebatched_size must be at least 2"):
            AsynchronousDataAccessor(sets.Numbers(4), **FORK, rebatched_size=size)
    with pytest.raises(ValueError, match="SharingStrategy"):
        AsynchronousDataAccessor(sets.Numbers(3), sharing_strategy=17)
    with pytest.raises(AssertionError, match=r"must be a poptorch.Options"):
        DataLoader({}, sets.Numbers(4))


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        ((sets.Numbers(4),), {"batch_size": 2}, "a Numbers as the first"),
        ((), {"dataset": sets.Numbers(4)}, "no options"),
        ((poptorch.Options(),), {}, "options, but no data set"),
    ],
)
def test_a_loader_without_options_or_data_says_how_to_call_it(
    args: tuple[poptorch.Options | sets.Numbers, ...],
    kwargs: dict[str, int | sets.Numbers],
    got: str,
) -> None:
    with pytest.raises(TypeError, match=got) as caught:
        DataLoader(*args, **kwargs)
    assert "poptorch.DataLoader(options, dataset" in str(caught.value)


@pytest.mark.parametrize("samples, arguments, level, text", [
    (12, {}, None, ""),
    (11, {}, "INFO", "3 of the 11 samples of the data set are left out"),
    (3, {}, "WARNING", "No batch will be loaded: the data set has 3 samples"),
    (11, {"drop_last": False}, "INFO", "3 samples, for which a model compiles another program"),
    (11, {"sampler": range(8)}, None, ""),
    (11, {"programs": (1, 2), "drop_last": False}, "INFO", "3 samples, for which a model compiles"),
    (21, {"programs": (2, 2), "drop_last": False}, "INFO", "5 samples, for which a model compiles"),
    (11, {"programs": (1, 1), "drop_last": False}, "WARNING", "Remove options.programs(1)"),
])  # fmt: skip
def test_a_warning_counts_samples_that_are_left_out(
    samples: int,
    arguments: dict[str, range | bool | tuple[int, int]],
    level: str | None,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="poptorch::python")
    accumulation, programs = arguments.pop("programs", (1, 0))
    opts = options(accumulation=accumulation)
    opts.programs(programs)
    loader(sets.Numbers(samples), 4, opts=opts, **arguments)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert text in caplog.text


def test_warnings_name_arguments_of_another_mode_and_streams_that_are_too_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
def test_loaders_rely_on_the_length() -> None:
    class Careless(sets.Unfinished):
        def __len__(self) -> int:
            return self.size

    assert len(list(Careless(3))) == 3  # plain iteration ends there
    assert values(loader(Careless(3))) == [[0], [1], [2]]


class Mixin:
    def __init__(self, *args: Any, extra: int = 0, **kwargs: Any) -> None:
        self.extra = extra
        super().__init__(*args, **kwargs)


class Subclass(Mixin, DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + self.extra


@pytest.mark.slow
@pytest.mark.spec("programs", 20)
def test_subclasses_of_the_loader_can_have_mix_ins() -> None:
    for more in ({}, {"mode": DataLoaderMode.Async, "async_options": FORK}):
        made = Subclass(options(2), sets.Numbers(4), extra=10, **more)
        assert values(made) == [[10, 11], [12, 13]]


def test_torch_s_loader_may_be_replaced_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_options = functools.partialmethod(DataLoader.__init__, options(2))
    monkeypatch.setattr(DataLoader, "__init__", with_options)
    monkeypatch.setattr(torch.utils.data, "DataLoader", DataLoader)
    assert values(torch.utils.data.DataLoader(sets.Numbers(4), batch_size=1)) == [[0, 1], [2, 3]]


def test_the_signature_is_poptorch_s() -> None:
    assert list(inspect.signature(DataLoader.__init__).parameters) == [
        "self",
        "options",
        "dataset",
        "batch_size",
        "shuffle",
        "num_workers",
        "drop_last",
        "persistent_workers",
        "auto_distributed_partitioning",
        "mode",
        "async_options",
        "rebatched_worker_size",
        "batch_sampler",
        "kwargs",
    ]
    assert issubclass(DataLoader, torch.utils.data.DataLoader)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_data_set_are_unchanged_and_the_loader_continues(workers: int) -> None:
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


BY_COLUMNS = torch.rand(23, 4).t().contiguous().t()  # whose rows are not contiguous
TENSORS = TensorDataset(
    torch.rand(23, 3), torch.arange(23), torch.rand(23, 2, 2).half(), BY_COLUMNS
)


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return [2 * t for t in super().__getitem__(index)]


def torch_s(dataset: TensorDataset, **arguments: Any) -> Any:
    if not arguments.get("batch_sampler"):
        arguments.setdefault("drop_last", True)
    return torch.utils.data.DataLoader(dataset, **arguments)


@pytest.mark.parametrize(
    "dataset, arguments",
    [
        *(
            (TENSORS, {"batch_size": size, "shuffle": shuffle, "drop_last": drop_last})
            for size in (4, 30)
            for shuffle in (True, False)
            for drop_last in (True, False)
        ),
        (TENSORS, {"batch_size": 4, "shuffle": True, "generator": 5}),
        (TENSORS, {"batch_sampler": BatchSampler(SequentialSampler(TENSORS), 4, False)}),
        (TENSORS, {"batch_sampler": BatchSampler(RandomSampler(TENSORS), 4, False)}),
        (TENSORS, {"sampler": [3, 22, 2]}),
        (TENSORS, {"batch_sampler": [[3, 20], [2]]}),
        (TENSORS, {"batch_size": None, "drop_last": False}),
        (Augmented(*TENSORS.tensors), {"batch_size": 2}),
    ],
)
def test_tensor_data_sets_give_torch_s_batches_over_several_epochs(
    dataset: Augmented | TensorDataset,
    arguments: Any,
) -> None:
    def epochs(make: Callable[..., Any]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        torch.manual_seed(3)
        own = dict(arguments)
        if "generator" in own:
            own["generator"] = torch.Generator().manual_seed(own["generator"])
        made = make(dataset, **own)
        batches = [batch for _ in range(3) for batch in made]
        return batches, torch.rand(2)  # the same draws from torch's generator

    (got, after), (expected, expected_after) = epochs(loader), epochs(torch_s)
    assert torch.equal(after, expected_after)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert [type(batch) for batch in got] == [type(batch) for batch in expected]


def test_batches_are_the_caller_s_own() -> None:
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


def test_a_padded_batch_has_the_smallest_size_that_holds_it() -> None:
    collate = poptorch.PadToSizes([8, 4], FILL)
    two_and_three, four_and_six = PADDED[:2], PADDED[2:]

    assert collate(two_and_three)["tokens"].shape == (2, 4)
    assert collate(four_and_six)["tokens"].shape == (2, 8)


def test_each_entry_of_a_dictionary_is_padded_with_its_own_value() -> None:
    batch = poptorch.PadToSizes([8, 4], FILL)(PADDED[:2])

    assert batch["tokens"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[7, 7, -100, -100], [7, 7, 7, -100]]
    assert batch["kind"].tolist() == [0, 1]


def test_padding_leaves_the_samples_as_they_are() -> None:
    poptorch.PadToSizes([8, 4], FILL)(PADDED[:2])

    assert PADDED[0]["tokens"] == [1, 2]


def test_entries_of_tuples_are_padded_along_their_first_dimension() -> None:
    samples = [(torch.ones(count, 3), count) for count in (1, 2)]

    frames, counts = poptorch.PadToSizes([4], {0: -1})(samples)

    assert frames.shape == (2, 4, 3)
    assert frames[0, 0].tolist() == [1, 1, 1]
    assert frames[0, 1:].unique().tolist() == [-1]
    assert counts.tolist() == [1, 2]


def test_a_program_for_each_size() -> None:
    chosen, collate = quick().programs(2), poptorch.PadToSizes([4, 8], FILL)
    batches = poptorch.DataLoader(chosen, PADDED, batch_size=2, collate_fn=collate)
    wrapper = poptorch.inferenceModel(
        lambda tokens, labels, kind: (tokens.sum(1) + kind, labels.ne(-100).sum(1)), chosen
    )
    sums, counts = zip(*(wrapper(**batch) for batch in batches), strict=True)
    assert torch.cat(sums).tolist() == [3, 7, 10, 21]
    assert torch.cat(counts).tolist() == [2, 3, 4, 6]


def test_samples_that_do_not_fit_and_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"longer than all sizes(?s:.)*6; the sizes are \[4\]"):
        poptorch.PadToSizes([4], FILL)(PADDED)
    for sizes, fill in (([], FILL), ([0], FILL), ([4], {})):
        with pytest.raises(poptorch.Error, match="needs lengths and fill values"):
            poptorch.PadToSizes(sizes, fill)


class Backwards(Sampler):
    """Yields the indices from the last to the first, in batches of two, and has no length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return (list(range(self.size))[::-1][i : i + 2] for i in range(0, self.size, 2))


def batches(size: int, batch_size: int, drop_last: bool = True) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)


@pytest.mark.parametrize("form", sets.FORMS)
def test_micro_batches_are_joined_as_one_batch_would_be_collated(form: str) -> None:
    data = sets.Structured(12, form)
    got = list(loader(data, opts=options(3), batch_sampler=batches(12, 2)))
    expected = list(torch.utils.data.DataLoader(data, 6))
    assert str(got) == str(expected)
    assert type(got[0]) is type(expected[0])
    assert str(list(loader(data, 3))) == str(list(torch.utils.data.DataLoader(data, 3)))
    assert values(loader(sets.Numbers(4), batch_sampler=batches(4, 2)))[0] == [0, 1]  # a single one


def record(samples: list[torch.Tensor]) -> tuple[Any, ...]:
    return torch.stack(samples), [f"sample {int(t)}" for t in samples], "a text", len(samples)


def test_texts_in_lists_are_joined_and_otherwise_the_last_one_counts() -> None:
    sampler = batches(3, 2, False)
    made = loader(sets.Numbers(3), opts=options(2), batch_sampler=sampler, collate_fn=record)
    ((tensor, *others),) = made
    assert tensor.tolist() == [0, 1, 2]
    assert others == [["sample 0", "sample 1", "sample 2"], "a text", 1]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_registered_types_are_joined(mode: DataLoaderMode) -> None:
    registerCustomArgParser(sets.Graph, sets.GraphParser())
    try:
        made = loader(
            sets.Numbers(8),
            opts=options(2),
            mode=mode,
            batch_sampler=batches(8, 2),
            collate_fn=sets.Graph.collate,
        )
        got = [(type(g), g.nodes.tolist(), g.edges.tolist(), g.name) for g in made]
    finally:
        registerCustomArgParser(sets.Graph, None)
    assert got == [
        (sets.Graph, [*range(i, i + 4)], [*range(-i, -i - 4, -1)], "graph") for i in (0, 4)
    ]


@pytest.mark.spec("data", 16)
@pytest.mark.parametrize("drop_last, last", [(True, []), (False, [[8, 9]])])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_drop_last_decides_about_incomplete_groups_of_a_batch_sampler(
    mode: DataLoaderMode, drop_last: bool, last: list[list[int]]
) -> None:
    given = {"batch_sampler": batches(10, 2), "drop_last": drop_last}
    made = loader(sets.Numbers(10), opts=options(2), mode=mode, **given)
    assert made.combinedBatchSize == 4
    assert len(made) == 2 + len(last)
    for _ in range(2):
        assert values(made) == [[0, 1, 2, 3], [4, 5, 6, 7], *last]


@pytest.mark.spec("data", 17)
@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_a_sampler_without_length_and_size(
    mode: DataLoaderMode, caplog: pytest.LogCaptureFixture
) -> None:
    made = loader(sets.Numbers(8), opts=options(2), mode=mode, batch_sampler=Backwards(8))
    assert values(made) == [[7, 6, 5, 4], [3, 2, 1, 0]]
    assert made.combinedBatchSize == 2
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(made)
    assert caplog.text == ""
    loader(sets.Numbers(8), opts=options(2), batch_sampler=Backwards(8), drop_last=False)
    assert "the last tensor may be incomplete" in caplog.text


def test_a_warning_names_sizes_that_do_not_divide(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loader(sets.Numbers(10), opts=options(2), batch_sampler=batches(10, 2), drop_last=False)
    assert caplog.records[0].levelname == "WARNING"
    assert "yields 5 micro-batches, one call takes 2" in caplog.text
    caplog.clear()
    loader(sets.Numbers(8), opts=options(2), batch_sampler=batches(8, 2), drop_last=False)
    assert caplog.text == ""


def test_a_batch_sampler_excludes_other_arguments_about_batches() -> None:
    sampler, two = batches(8, 2), options(process=0, processes=2)
    for kwargs in ({"batch_size": 2}, {"shuffle": True}, {"batch_size": None}):
        with pytest.raises(Error, match="mutually exclusive with batch_size, shuffle"):
            loader(sets.Numbers(8), batch_sampler=sampler, **kwargs)
    with pytest.raises(Error, match="mutually exclusive with auto_distributed_partitioning=True"):
        loader(sets.Numbers(8), opts=two, batch_sampler=sampler)
    made = loader(
        sets.Numbers(8), opts=two, batch_sampler=sampler, auto_distributed_partitioning=False
    )
    assert values(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def parts_of(size: int, combined: int, processes: int, drop_last: bool) -> list[list[int]]:
    """Return the samples that each process reads, in the order without shuffling."""
    each, more = divmod(size, processes)
    ends = list(itertools.accumulate([0, *(each + (p < more) for p in range(processes))]))
    if drop_last:
        ends = [p * combined * (size // (combined * processes)) for p in range(processes + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def draw(rng: random.Random) -> tuple[Any, ...]:
    """Return counts and settings; sizes go up to some combined batches of all processes."""
    replicas, processes = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 3])
    group = rng.choice([group for group in (1, 2, 4) if replicas % group == 0])
    batch, iterations, accumulation = rng.randint(1, 4), rng.randint(1, 3), rng.choice([1, 1, 2])
    combined = batch * iterations * (replicas // group) * accumulation
    size = rng.randint(1, 4 * combined * processes + 2)
    settings = {
        "num_workers": rng.choice([0, 0, 1, 2]),
        "drop_last": rng.random() < 0.5,
        "shuffle": rng.random() < 0.5,
        "mode": rng.choice(list(DataLoaderMode)),
    }
    parts = parts_of(size, combined, processes, settings["drop_last"])
    if not all(parts):  # an asynchronous loader needs a first element
        settings["mode"] = DataLoaderMode.Sync
    if settings["mode"] is DataLoaderMode.AsyncRebatched:
        settings["rebatched_worker_size"] = min(rng.randint(1, 8), combined)
    return (iterations, replicas, accumulation, group), batch, size, combined, parts, settings


def check(case: tuple[Any, ...]) -> None:
    counts, batch, size, combined, parts, settings = case
    read = [[], []]
    for process, part in enumerate(parts):
        opts = options(*counts, process=process, processes=len(parts), seed=size)
        made = loader(sets.Numbers(size), batch, opts=opts, **settings)
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


@pytest.mark.slow
@pytest.mark.spec("data", 4, 12, 13, 14)
@pytest.mark.spec("parallel", 40)
@pytest.mark.parametrize("seed", few(range(5), 0, 2))
def test_random_loaders_return_every_sample_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        case = draw(rng)
        try:
            check(case)
        except BaseException as error:
            error.add_note(str(case))
            raise


def of_each_process(
    processes: int,
    dataset: Any,
    batch_size: int | None,
    seed: int | None = None,
    iterations: int = 1,
    **kwargs: Any,
) -> list[DataLoader]:
    def made(process: int) -> DataLoader:
        own = options(iterations, process=process, processes=processes, seed=seed)
        return loader(dataset, batch_size, opts=own, **kwargs)

    return [made(process) for process in range(processes)]


def flat(batches: DataLoader) -> list[float]:
    return [x for batch in values(batches) for x in batch]


@pytest.mark.spec("data", 4)
def test_a_line_of_the_log_names_incomplete_last_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="poptorch::python")
    loaders = of_each_process(3, sets.Numbers(53), 4, drop_last=False)
    assert [len(made.dataset) for made in loaders] == [18, 18, 17]
    assert "combined batch size (4) x 3 processes" in caplog.text
    for rest in (2, 1):
        assert f"the last batch of this process has {rest} samples" in caplog.text


@pytest.mark.parametrize(
    "samples, arguments, rows",
    [
        (53, {"drop_last": False}, (2, 2, 1)),
        (48, {"drop_last": False}, (4, 4, 4)),
        (53, {}, (None,) * 3),  # whole batches only
    ],
)
def test_a_job_knows_the_sizes_of_the_last_batches_before_it_trains(
    samples: int, arguments: dict[str, Any], rows: tuple[int | None, ...]
) -> None:
    known = []

    for made in of_each_process(3, sets.Numbers(samples), 4, **arguments):
        iter(made)
        known.append(_job.data_length().last_rows)

    assert known == [*rows]


@pytest.mark.parametrize("mode", DataLoaderMode)
def test_the_last_batch_of_every_mode_has_the_size_that_the_job_knows(mode: DataLoaderMode) -> None:
    (made,) = of_each_process(3, sets.Numbers(53), 4, drop_last=False, mode=mode)[:1]

    *_, last = made

    assert len(last) == _job.data_length().last_rows
    made.terminate()


def test_every_process_reads_everything_without_partitioning() -> None:
    loaders = of_each_process(2, sets.Numbers(6), 3, auto_distributed_partitioning=False)
    assert [values(made) for made in loaders] == [[[0, 1, 2], [3, 4, 5]]] * 2
    streams = of_each_process(2, sets.Stream(6), 3, auto_distributed_partitioning=False)
    assert [values(made) for made in streams] == [[[0, 1, 2], [3, 4, 5]]] * 2


def test_processes_that_share_the_stages_read_the_same() -> None:
    def made(process: int, seed: int = 5) -> DataLoader:
        own = options(1, process=process, processes=4, seed=seed)
        own.Distributed.stageProcesses(2)
        torch.manual_seed(process)
        return loader(sets.Numbers(12), 3, opts=own, shuffle=True)

    first, second, third, fourth = (flat(made(process)) for process in range(4))
    assert first == second != third == fourth
    assert sorted(first + third) == list(range(12))


@pytest.mark.spec("parallel", 39)
def test_data_that_cannot_be_partitioned_is_refused() -> None:
    with pytest.raises(AssertionError, match="batch_size=None not allowed"):
        of_each_process(2, sets.Numbers(6), None, drop_last=False)
    with pytest.raises(AssertionError, match="not supported for IterableDataset"):
        of_each_process(2, sets.Stream(6), 2)
    with pytest.raises(AssertionError, match=r"must set poptorch.Options.randomSeed\(\)"):
        of_each_process(2, sets.Numbers(6), 2, shuffle=True)


@pytest.mark.slow
@pytest.mark.spec("data", 15)
@pytest.mark.parametrize(
    "mode, workers, persistent",
    [
        (DataLoaderMode.Sync, 0, None),
        (DataLoaderMode.Sync, 1, False),
        (ALL_MODES[1], 2, None),
    ],
)
def test_one_permutation_for_all_processes_and_a_new_one_every_epoch(
    mode: DataLoaderMode, workers: int, persistent: bool | None
) -> None:
    loaders = of_each_process(
        2,
        sets.Numbers(23),
        2,
        seed=5,
        shuffle=True,
        mode=mode,
        num_workers=workers,
        persistent_workers=persistent,
    )
    epochs = [[x for made in loaders for x in flat(made)] for _ in range(4)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 20
    assert len({tuple(epoch) for epoch in epochs}) == 4
    for first, second in ((0, 1), (2, 3)):
        assert {*epochs[first], *epochs[second]} == set(range(23))
    repeated = of_each_process(2, sets.Numbers(23), 2, seed=5, shuffle=True)
    assert [x for made in repeated for x in flat(made)] == epochs[0]
    other = of_each_process(2, sets.Numbers(23), 2, seed=6, shuffle=True)
    assert [x for made in other for x in flat(made)] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterations_at_once_have_their_own_permutations(workers: int) -> None:
    (made, _) = of_each_process(2, sets.Numbers(20), 2, seed=1, shuffle=True, num_workers=workers)
    (same, _) = of_each_process(2, sets.Numbers(20), 2, seed=1, shuffle=True)
    expected = [flat(same), flat(same), flat(same)]
    first, second = iter(made), iter(made)
    got = [[], []]
    for a, b in zip(first, second, strict=True):
        got[0] += a.tolist()
        got[1] += b.tolist()
    assert got == expected[:2]
    del first, second
    assert flat(made) == expected[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_elements_loaded_ahead_of_an_abandoned_iteration_do_not_change_the_permutation(
    workers: int,
) -> None:
    """How far ahead it is differs between processes, and their parts would overlap."""
    data = sets.Counted(23)
    (ahead, _) = of_each_process(
        2,
        data,
        5,
        seed=1,
        shuffle=True,
        mode=DataLoaderMode.Async,
        num_workers=workers,
        async_options={"buffer_size": 6},
    )
    (same, _) = of_each_process(2, sets.Numbers(23), 5, seed=1, shuffle=True)
    expected = [flat(same) for _ in range(3)]
    assert next(iter(ahead)).tolist() == expected[0][:5]
    assert eventually(lambda: data.count >= 6 * 5)  # three iterations
    assert [flat(ahead), flat(ahead)] == expected[1:]
    ahead.terminate()


def test_tensor_data_sets_are_indexed_directly_with_the_same_result() -> None:
    numbers = torch.arange(20.0)
    for shuffle in (False, True):
        short = of_each_process(2, TensorDataset(numbers), 2, seed=1, shuffle=shuffle)
        long = of_each_process(2, sets.Numbers(20), 2, seed=1, shuffle=shuffle)
        for a, b in zip(short, long, strict=True):
            for _ in range(3):
                assert [batch[0].tolist() for batch in a] == values(b)


def test_a_generator_is_refused_with_a_remedy() -> None:
    numbers = (torch.tensor(number) for number in range(8))

    with pytest.raises(TypeError, match="can be read only once") as caught:
        poptorch.DataLoader(poptorch.Options(), numbers, batch_size=2)

    assert "list(samples)" in str(caught.value)
    assert "IterableDataset" in str(caught.value)
