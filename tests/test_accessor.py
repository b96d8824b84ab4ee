"""The asynchronous accessor: what arrives, when things are loaded, and how long they stay valid."""

import logging
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import data_sets as sets
from helpers.cases import few
from helpers.loaders import ASYNC_MODES, FORK, loader, options, values
from helpers.patience import eventually
from poptorch._base.errors import Error
from poptorch.argparsers import registerCustomArgParser
from poptorch.dataloader import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode, SharingStrategy

pytestmark = pytest.mark.slow
ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)
UNLIKE = "shapes of the first"


def accessor(dataset: Any, **kwargs: Any) -> AsynchronousDataAccessor:
    return AsynchronousDataAccessor(dataset, **{**FORK, **kwargs})


def torch_s_loader(
    dataset: sets.Counted | sets.Numbers | sets.Structured,
    size: int = 1,
    collate_fn: Callable[..., Any] | type | None = None,
) -> Any:
    return torch.utils.data.DataLoader(dataset, size, collate_fn=collate_fn)


@pytest.mark.spec("data", 20)
@pytest.mark.parametrize("kind", ["Numbers", "Unfinished", "Endless", "Stream", "SizedStream"])
def test_an_accessor_takes_any_data_set(kind: str) -> None:
    made = accessor(getattr(sets, kind)(4))
    for _ in range(3):
        assert values(made) == [[0], [1], [2], [3]]


def test_a_torch_loader_a_list_and_a_generator() -> None:
    made = accessor(torch_s_loader(sets.Numbers(5), 2))
    assert values(made) == [[0, 1], [2, 3], [4]]  # the last one has fewer rows
    assert len(made) == 3
    assert values(accessor([torch.ones(1), torch.zeros(1)])) == [[1], [0]]
    made = accessor(torch.tensor(float(i)) for i in range(3))
    assert values(made) == [[0], [1], [2]]
    assert values(made) == []  # a generator can be iterated once


@pytest.mark.spec("data", 6)
@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_sequences_arrive_as_lists_and_dicts_as_dicts_in_their_order(mode: DataLoaderMode) -> None:
    for form in ("tuple", "list", "named tuple"):
        first = next(iter(loader(sets.Structured(4, form), 2, mode=mode)))
        assert type(first) is type(next(accessor(sets.Structured(4, form)))) is list
        assert [t.tolist() for t in first] == [[0, 1], [0, -1]]
    first = next(iter(loader(sets.Structured(4, "dict"), 2, mode=mode)))
    assert type(first) is dict
    assert [(k, v.tolist()) for k, v in first.items()] == [("b", [0, 1]), ("a", [0, -1])]


@pytest.fixture
def graph_parser() -> Iterator[Any]:
    registerCustomArgParser(sets.Graph, sets.GraphParser())
    yield
    registerCustomArgParser(sets.Graph, None)
    registerCustomArgParser(sets.SubGraph, None)


@pytest.mark.spec("data", 23)
@pytest.mark.usefixtures("graph_parser")
@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_registered_types_are_rebuilt(mode: DataLoaderMode) -> None:
    made = loader(sets.Numbers(6), 2, mode=mode, collate_fn=sets.Graph.collate, drop_last=False)
    for _ in range(2):
        seen = [(type(g), g.nodes.tolist(), g.edges.tolist(), g.name) for g in made]
        assert seen == [(sets.Graph, [i, i + 1], [-i, -i - 1], "graph") for i in (0.0, 2.0, 4.0)]


@pytest.mark.spec("data", 23)
@pytest.mark.usefixtures("graph_parser")
def test_sub_classes_need_their_own_registration() -> None:
    data = torch_s_loader(sets.Numbers(2), collate_fn=sets.SubGraph.collate)
    with pytest.raises(Error, match="worker thread failed to start"):
        accessor(data)
    registerCustomArgParser(sets.SubGraph, sets.GraphParser())
    assert type(next(accessor(data))) is sets.SubGraph


@pytest.mark.spec("data", 9)
@pytest.mark.parametrize("form", ["nested", "with text", "with number"])
def test_nested_structures_and_other_objects_are_refused(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Error, match="worker thread failed to start") as caught:
        accessor(torch_s_loader(sets.Structured(4, form), 2, collate_fn=list))
    for text in (str(caught.value), caplog.text):
        assert "is not a torch tensor" in text
        assert "flat 1D container" in text


@pytest.mark.parametrize(
    "first, second, message",
    [
        (torch.ones(2, 2), torch.ones(2, 3), UNLIKE),
        (TWO, torch.ones(2, 1), UNLIKE),
        ((TWO, TWO), (TWO, ONE), "same first dimension"),
        ([TWO], [TWO, TWO], UNLIKE),
        (torch.ones(()), ONE, UNLIKE),
        (TWO, [TWO], "must be of the same kind"),
        (TWO, "text", "is not a torch tensor"),
        ({"b": ONE}, {"a": ONE}, "must have the same keys"),
    ],
)
def test_all_elements_are_like_the_first(first: Any, second: Any, message: str) -> None:
    made = accessor([first, second])
    next(made)
    with pytest.raises(AssertionError, match=f"(?s)data fetcher.*({message}|{UNLIKE})"):
        next(made)


def test_later_elements_take_keys_types_and_shapes_of_the_first_one() -> None:
    made = accessor([{"b": ONE, "a": 2 * ONE}, {"a": 4 * ONE, "b": 3 * ONE}])
    found = [[(k, v.item()) for k, v in d.items()] for d in made]
    assert found == [[("b", 1), ("a", 2)], [("b", 3), ("a", 4)]]
    made = accessor([torch.tensor([1.5]), torch.tensor([2], dtype=torch.int64)])
    assert [(t.dtype, t.item()) for t in made] == [(torch.float32, 1.5), (torch.float32, 2.0)]
    made = accessor([[THREE, torch.ones(3, 2)], [TWO, torch.ones(2, 2)]])
    assert [[tuple(t.shape) for t in each] for each in made] == [[(3,), (3, 2)], [(2,), (2, 2)]]


@pytest.mark.spec("data", 7)
def test_an_element_is_valid_until_the_next_is_asked_for_and_then_overwritten() -> None:
    made = accessor(sets.Numbers(8), buffer_size=2)
    kept = [(t, t.clone()) for t in made]
    assert [copy.item() for _, copy in kept] == list(range(8))
    assert [view.item() for view, _ in kept] != list(range(8))
    data = sets.Counted(6)
    made = accessor(data, buffer_size=2, load_indefinitely=False)
    for expected, element in enumerate(made):
        # The other buffer gets full, this one stays.
        assert eventually(lambda n=expected: data.count == min(n + 2, 6))
        time.sleep(0.01)
        assert element.item() == expected


POISON = {
    torch.float16: float("nan"),
    torch.complex64: complex("nan"),
    torch.bool: True,
    torch.int64: torch.iinfo(torch.int64).max,
}


def test_poisoned_buffers_show_use_after_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POISON_BUFFERS", "1")
    data = [[torch.zeros(2, dtype=dtype) for dtype in POISON]] * 3
    made = accessor(data, buffer_size=10, load_indefinitely=False)
    kept = list(made)
    reference = [torch.full((2,), value, dtype=dtype) for dtype, value in POISON.items()]
    for element in kept:
        torch.testing.assert_close(element, reference, equal_nan=True)
    assert all(not any(t.any() for t in element) for element in made)  # but not before


def test_elements_survive_the_accessor() -> None:
    made = accessor(sets.Numbers(3, (1000,)))
    element = next(made)
    made.terminate()
    del made
    assert element.sum() == 0


@pytest.mark.spec("data", 8)
@pytest.mark.parametrize("preload", [False, True])
def test_one_element_is_loaded_at_construction_or_the_ring_filled(preload: bool) -> None:
    data = sets.Counted(9)
    made = accessor(data, buffer_size=4, early_preload=preload)
    assert eventually(lambda: data.count == (4 if preload else 1))
    time.sleep(0.1)
    assert data.count == (4 if preload else 1)
    for _ in range(3):  # which keeps what is loaded
        iter(made)
    assert eventually(lambda: data.count == 4)
    time.sleep(0.05)
    assert data.count == 4
    assert next(made) == 0
    assert values(made) == [[float(i)] for i in range(9)]


def test_the_next_epoch_is_loaded_ahead_or_not() -> None:
    for indefinitely, loaded in ((True, 3 + 5), (False, 3)):
        data = sets.Counted(3)
        made = accessor(data, buffer_size=5, load_indefinitely=indefinitely)
        values(made)
        assert eventually(lambda data=data, loaded=loaded: data.count == loaded)
        time.sleep(0.1)
        assert data.count == loaded
        assert values(made) == [[0], [1], [2]]


def test_next_without_a_loop_and_beginning_again_in_the_middle() -> None:
    made = accessor(sets.Numbers(20), buffer_size=3)
    for count in (1, 2, 5, 19):
        iter(made)
        assert [next(made).item() for _ in range(count)] == list(range(count))
    assert values(made) == [[float(i)] for i in range(20)]
    made = accessor(sets.Numbers(2))
    assert iter(made) is made
    assert [next(made).item(), next(made).item()] == [0, 1]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(made)
    iter(made)
    assert next(made).item() == 0


@pytest.mark.spec("data", 21)
def test_an_accessor_takes_a_synchronous_loader_and_refuses_an_asynchronous_one() -> None:
    with pytest.raises(Error, match="already uses an AsynchronousDataAccessor"):
        accessor(loader(sets.Numbers(4), mode=DataLoaderMode.Async))
    sync = loader(sets.Numbers(7), 2)
    made = accessor(sync)
    assert len(made) == 3
    assert values(made) == [[0, 1], [2, 3], [4, 5]]
    assert values(sync) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AssertionError, match="only works if 'rebatched_size' is specified"):
        accessor(loader(sets.Numbers(7), 2, drop_last=False))
    assert values(accessor(loader(sets.Numbers(3), 1, drop_last=False))) == [[0], [1], [2]]


class Elements(list):
    """Has attributes, too."""


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [(7,), (1,) * 7, (2, 5), (4, 0, 3)])
def test_rebatching_any_sizes_loses_and_repeats_nothing(
    rows: tuple[int, ...], drop_last: bool
) -> None:
    data = Elements(torch.arange(7.0).split(rows))
    data.rebatched_drop_last = drop_last
    made = accessor(data, rebatched_size=3)
    for _ in range(2):
        assert values(made) == [[0, 1, 2], [3, 4, 5]] + ([] if drop_last else [[6]])


def test_rebatching_loads_no_more_than_fits_and_needs_rows() -> None:
    data = sets.Counted(9)
    made = accessor(torch_s_loader(data, 1), rebatched_size=2, buffer_size=2, early_preload=True)
    assert eventually(lambda: data.count == 4)
    time.sleep(0.05)
    assert data.count == 4
    assert values(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    made = accessor(torch_s_loader(sets.Numbers(3), 1), rebatched_size=5)
    for _ in range(2):
        assert values(made) == []
    for element in (torch.tensor(1.0), (ONE, TWO)):
        with pytest.raises(Error, match="same first dimension"):
            accessor([element], rebatched_size=2)


@pytest.mark.spec("data", 28)
@pytest.mark.parametrize(
    "strategy", few(SharingStrategy, SharingStrategy.SharedMemory, SharingStrategy.Fork)
)
def test_workers_have_a_copy_of_the_data_set(
    strategy: SharingStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared, own = torch.zeros(2).share_memory_(), torch.zeros(2)
    made = accessor(sets.Carrying(shared, own), sharing_strategy=strategy)
    shared.fill_(7)
    own.fill_(7)
    assert values(made) == [[0, 0], [7, 7], [1, 1]]
    assert not list(tmp_path.glob("poptorch_*"))


@pytest.fixture
def start_method() -> Iterator[Any]:
    before = multiprocessing.get_start_method()
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.long
def test_torch_s_workers_are_started_as_the_program_would_start_them(
    start_method: Callable[..., Any],
) -> None:
    for method in ("fork", "spawn"):
        start_method(method)
        made = accessor(sets.StartMethod(1), sharing_strategy=SharingStrategy.ForkServer)
        assert sets.METHODS[int(next(made))] == method
        made.terminate()


class Unpicklable(sets.Numbers):
    """Only a forked process can have it."""

    def __reduce__(self) -> None:
        raise TypeError("Unpicklable")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loading_process_is_forked_where_torch_forks_workers(
    workers: int, start_method: Callable[..., Any]
) -> None:
    start_method("fork")
    made = DataLoader(options(), Unpicklable(2), mode=DataLoaderMode.Async, num_workers=workers)
    assert values(made) == [[0], [1]]
    made.terminate()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loading_process_is_not_forked_where_torch_forks_none(
    workers: int, start_method: Callable[..., Any]
) -> None:
    start_method("spawn")
    with pytest.raises((TypeError, Error), match="Unpicklable"):
        DataLoader(options(), Unpicklable(2), mode=DataLoaderMode.Async, num_workers=workers)


def test_torch_s_file_system_sharing_is_tolerated() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    made = loader(sets.Numbers(6), 2, mode=DataLoaderMode.Async, num_workers=1)
    assert values(made) == [[0, 1], [2, 3], [4, 5]]
    made.terminate()


@pytest.mark.spec("data", 30)
def test_forked_processes_do_not_need_the_program_s_threads() -> None:
    made = loader(sets.Numbers(6, (300, 300)), 2, opts=options(), mode=DataLoaderMode.Async)
    torch.set_num_threads(2)
    torch.ones(600, 600) @ torch.ones(600, 600)  # starts the pool, after the process
    assert [batch.shape for batch in made] == [(2, 300, 300)] * 3


def test_every_epoch_ends_with_a_verdict_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="poptorch::python")
    for element in accessor(sets.Slow(5, 20), buffer_size=1):
        assert element >= 0
    (line,) = [line for line in caplog.messages if "elements: " in line]
    waited = re.match(
        r"5 elements: .* took (\S+) s of \S+ s \(\d+%\). The host limits the run", line
    )
    assert float(waited[1]) >= 4 * 0.02 * 0.9
