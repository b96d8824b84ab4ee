"""The asynchronous accessor: what arrives, when things are loaded, and how long they stay valid."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from helpers.data_sets import (
    METHODS,
    Counted,
    Endless,
    Graph,
    GraphParser,
    Numbers,
    SizedStream,
    Sizes,
    StartMethod,
    Stream,
    Structured,
    SubGraph,
    Unfinished,
    as_dict,
    as_list,
    as_nested,
    as_pair,
    as_tuple,
    collate_graph,
    collate_sub_graph,
    with_number,
    with_text,
)
from helpers.leaks import descendants
from helpers.loaders import ASYNC_MODES, FORK, loader, options, values
from helpers.patience import eventually
from poptorch._base.errors import Error
from poptorch.argparsers import registerCustomArgParser
from poptorch.dataloader import AsynchronousDataAccessor, DataLoader
from poptorch.enums import DataLoaderMode, SharingStrategy

pytestmark = pytest.mark.slow


def accessor(dataset, **kwargs):
    return AsynchronousDataAccessor(dataset, **{**FORK, **kwargs})


@pytest.mark.spec("data", 20)
@pytest.mark.parametrize(
    "dataset", [Numbers(4), Unfinished(4), Endless(4), Stream(4), SizedStream(4)]
)
def test_any_data_set(dataset):
    made = accessor(dataset)
    for _ in range(3):
        assert values(made) == [[0], [1], [2], [3]]


def test_a_torch_loader_and_a_list():
    made = accessor(torch.utils.data.DataLoader(Numbers(5), 2))
    assert values(made) == [[0, 1], [2, 3], [4]]  # the last one has fewer rows
    assert len(made) == 3
    assert values(accessor([torch.ones(1), torch.zeros(1)])) == [[1], [0]]


def test_a_generator_can_be_iterated_once():
    made = accessor(torch.tensor(float(i)) for i in range(3))
    assert values(made) == [[0], [1], [2]]
    assert values(made) == []


@pytest.mark.spec("data", 6)
@pytest.mark.parametrize("mode", ASYNC_MODES)
@pytest.mark.parametrize("form, kind", [(as_tuple, list), (as_list, list), (as_pair, list)])
def test_sequences_arrive_as_lists(form, kind, mode):
    first = next(iter(loader(Structured(4, form), 2, mode=mode)))
    assert type(first) is kind
    assert [t.tolist() for t in first] == [[0, 1], [0, -1]]
    assert type(next(accessor(Structured(4, form)))) is list


@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_dicts_arrive_as_dicts_in_their_order(mode):
    first = next(iter(loader(Structured(4, as_dict), 2, mode=mode)))
    assert type(first) is dict
    assert {k: v.tolist() for k, v in first.items()} == {"b": [0, 1], "a": [0, -1]}
    assert list(first) == ["b", "a"]


def test_the_keys_of_the_first_element_count():
    one = torch.ones(1)
    made = accessor([{"b": one, "a": 2 * one}, {"a": 4 * one, "b": 3 * one}])
    assert [[(k, v.item()) for k, v in d.items()] for d in made] == [
        [("b", 1), ("a", 2)],
        [("b", 3), ("a", 4)],
    ]
    made = accessor([{"b": one}, {"a": one}])
    next(made)
    with pytest.raises(AssertionError, match="must have the same keys"):
        next(made)


@pytest.fixture
def graph_parser():
    registerCustomArgParser(Graph, GraphParser())
    yield
    registerCustomArgParser(Graph, None)
    registerCustomArgParser(SubGraph, None)


@pytest.mark.spec("data", 23)
@pytest.mark.usefixtures("graph_parser")
@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_registered_types_are_rebuilt(mode, strategy):
    made = loader(
        Numbers(6), 2, mode=mode, collate_fn=collate_graph, drop_last=False,
        async_options={"sharing_strategy": strategy},
    )  # fmt: skip
    for _ in range(2):
        seen = [(type(g), g.nodes.tolist(), g.edges.tolist(), g.name) for g in made]
        assert seen == [
            (Graph, [i, i + 1], [-i, -i - 1], "graph") for i in (0.0, 2.0, 4.0)
        ]  # fmt: skip


@pytest.mark.spec("data", 23)
@pytest.mark.usefixtures("graph_parser")
def test_sub_classes_need_their_own_registration():
    data = torch.utils.data.DataLoader(Numbers(2), collate_fn=collate_sub_graph)
    with pytest.raises(Error, match="worker thread failed to start"):
        accessor(data)
    registerCustomArgParser(SubGraph, GraphParser())
    assert type(next(accessor(data))) is SubGraph


@pytest.mark.spec("data", 9)
@pytest.mark.parametrize("form", [as_nested, with_text, with_number])
def test_nested_structures_and_other_objects_are_refused(form, caplog):
    with pytest.raises(Error, match="worker thread failed to start") as caught:
        accessor(torch.utils.data.DataLoader(Structured(4, form), 2, collate_fn=list))
    for text in (str(caught.value), caplog.text):
        assert "is not a torch tensor" in text
        assert "flat 1D container" in text


def test_all_elements_have_the_shape_and_kind_of_the_first():
    for elements, message in (
        ([torch.ones(2), torch.ones(3)], "shapes of the first"),
        ([torch.ones(2), [torch.ones(2)]], "must be of the same kind"),
        ([[torch.ones(2)], [torch.ones(2), torch.ones(2)]], "shapes of the first"),
        ([torch.ones(2), "text"], "is not a torch tensor"),
    ):
        made = accessor(elements)
        next(made)
        with pytest.raises(AssertionError, match=f"(?s)data fetcher.*{message}"):
            next(made)


def test_values_are_cast_to_the_first_type():
    made = accessor([torch.tensor([1.5]), torch.tensor([2], dtype=torch.int64)])
    assert [(t.dtype, t.item()) for t in made] == [(torch.float32, 1.5), (torch.float32, 2.0)]


@pytest.mark.spec("data", 7)
def test_an_element_is_overwritten_when_the_next_ones_are_fetched():
    made = accessor(Numbers(8), buffer_size=2)
    kept = [(t, t.clone()) for t in made]
    assert [copy.item() for _, copy in kept] == list(range(8))
    assert [view.item() for view, _ in kept] != list(range(8))


def test_an_element_is_valid_until_the_next_is_asked_for():
    data = Counted(6)
    made = accessor(data, buffer_size=2, load_indefinitely=False)
    for expected, element in enumerate(made):
        # The other buffer gets full, this one stays.
        assert eventually(lambda n=expected: data.count == min(n + 2, 6))
        time.sleep(0.01)
        assert element.item() == expected


def test_poisoned_buffers_show_use_after_release(monkeypatch):
    monkeypatch.setenv("POPTORCH_POISON_BUFFERS", "1")
    made = accessor(Numbers(3), buffer_size=10, load_indefinitely=False)
    kept = list(made)
    assert all(t.isnan() for t in kept)
    for expected, element in enumerate(made):
        assert element == expected  # but not before


def test_elements_survive_the_accessor():
    made = accessor(Numbers(3, (1000,)))
    element = next(made)
    made.terminate()
    del made
    assert element.sum() == 0


@pytest.mark.spec("data", 8)
def test_one_element_is_loaded_at_construction():
    data = Counted(9)
    made = accessor(data, buffer_size=4)
    time.sleep(0.1)
    assert data.count == 1
    iter(made)
    assert eventually(lambda: data.count == 4)
    time.sleep(0.05)
    assert data.count == 4


def test_early_preload_fills_the_ring():
    data = Counted(9)
    made = accessor(data, buffer_size=4, early_preload=True)
    assert eventually(lambda: data.count == 4)
    time.sleep(0.1)
    assert data.count == 4
    assert values(made) == [[float(i)] for i in range(9)]


def test_the_next_epoch_is_loaded_ahead_or_not():
    data = Counted(3)
    made = accessor(data, buffer_size=5, load_indefinitely=True)
    values(made)
    assert eventually(lambda: data.count == 3 + 5)
    assert values(made) == [[0], [1], [2]]
    data = Counted(3)
    made = accessor(data, buffer_size=5, load_indefinitely=False)
    values(made)
    time.sleep(0.1)
    assert data.count == 3
    assert values(made) == [[0], [1], [2]]
    assert data.count == 6


def test_beginning_again_unused_keeps_what_is_loaded():
    data = Counted(20)
    made = accessor(data, buffer_size=3)
    for _ in range(3):
        iter(made)
    assert eventually(lambda: data.count == 3)
    assert next(made) == 0
    assert data.count <= 4


def test_beginning_again_in_the_middle_drops_what_is_loaded():
    made = accessor(Numbers(20), buffer_size=3)
    for count in (1, 2, 5, 19):
        iter(made)
        assert [next(made).item() for _ in range(count)] == list(range(count))
    assert values(made) == [[float(i)] for i in range(20)]


def test_next_without_a_loop():
    made = accessor(Numbers(2))
    assert iter(made) is made
    assert [next(made).item(), next(made).item()] == [0, 1]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(made)
    iter(made)
    assert next(made).item() == 0


@pytest.mark.spec("data", 21)
def test_an_asynchronous_loader_is_refused():
    made = loader(Numbers(4), mode=DataLoaderMode.Async)
    with pytest.raises(Error, match="already uses an AsynchronousDataAccessor"):
        accessor(made)


def test_a_sync_loader_may_be_wrapped():
    sync = loader(Numbers(7), 2)
    made = accessor(sync)
    assert (len(made), values(made)) == (3, [[0, 1], [2, 3], [4, 5]])
    assert values(sync) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AssertionError, match="only works if 'rebatched_size' is specified"):
        accessor(loader(Numbers(7), 2, drop_last=False))
    assert values(accessor(loader(Numbers(3), 1, drop_last=False))) == [[0], [1], [2]]


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_rebatching(size):
    sync = loader(Numbers(17), 3, drop_last=False)
    made = accessor(sync, rebatched_size=size)
    everything = list(range(17))
    for _ in range(2):
        whole = 17 // size * size
        assert values(made) == [everything[i : i + size] for i in range(0, whole, size)]
    assert len(made) == len(sync) * 3 // size


def test_rebatching_keeps_the_rest_when_the_data_set_says_so():
    data = torch.utils.data.DataLoader(Numbers(7), 3)
    data.rebatched_drop_last = False
    made = accessor(data, rebatched_size=2)
    for _ in range(2):
        assert values(made) == [[0, 1], [2, 3], [4, 5], [6]]
    assert values(accessor(Sizes(1, 0, 4, 2), rebatched_size=3)) == [[0, 1, 2], [3, 4, 5]]


def test_rebatching_may_yield_nothing():
    made = accessor(torch.utils.data.DataLoader(Numbers(3), 1), rebatched_size=5)
    assert values(made) == []
    assert values(made) == []


def test_arguments_that_make_no_sense():
    for kwargs in ({"buffer_size": 0}, {"rebatched_size": 1}, {"miss_sleep_time_in_ms": -1}):
        with pytest.raises(AssertionError, match=next(iter(kwargs))):
            accessor(Numbers(3), **kwargs)
    with pytest.raises(ValueError, match="SharingStrategy"):
        accessor(Numbers(3), sharing_strategy=17)


@pytest.mark.spec("data", 28)
@pytest.mark.parametrize("strategy", list(SharingStrategy))
def test_the_data_set_is_a_copy(strategy):
    shared, own = torch.zeros(2).share_memory_(), torch.zeros(2)
    made = accessor([own, own, shared, own], sharing_strategy=strategy)
    shared.fill_(7)
    own.fill_(7)
    assert values(made) == [[0, 0], [0, 0], [7, 7], [0, 0]]


@pytest.mark.parametrize("strategy", [SharingStrategy.ForkServer, SharingStrategy.SharedMemory])
def test_torch_s_workers_are_started_as_the_program_would_start_them(strategy):
    before = multiprocessing.get_start_method()
    try:
        for method in ("fork", "spawn"):
            multiprocessing.set_start_method(method, force=True)
            made = accessor(StartMethod(1), sharing_strategy=strategy)
            assert METHODS[int(next(made))] == method
            made.terminate()
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (0, "fork"), (1, "spawn")])
def test_a_loader_with_workers_is_forked_where_torch_forks_them(workers, method):
    class Local(Numbers):
        """Cannot be pickled."""

    before = multiprocessing.get_start_method()
    try:
        multiprocessing.set_start_method(method, force=True)
        if workers and method == "fork":
            made = DataLoader(options(), Local(2), mode=DataLoaderMode.Async, num_workers=workers)
            assert values(made) == [[0], [1]]
            made.terminate()
        else:
            with pytest.raises((AttributeError, Error), match="Local"):
                DataLoader(options(), Local(2), mode=DataLoaderMode.Async, num_workers=workers)
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_torch_s_workers_are_copies_of_a_process_that_has_imported_torch():
    others = set(descendants())  # compilers of other tests stay for a while
    made = loader(
        Numbers(6), 2, mode=DataLoaderMode.Async, num_workers=2,
        async_options={"sharing_strategy": SharingStrategy.ForkServer},
    )  # fmt: skip
    assert values(made) == [[0, 1], [2, 3], [4, 5]]
    started = set(descendants()) - others
    commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in started}
    assert (len(started), len(commands)) == (3, 1)  # no server of their own
    made.terminate()


def test_torch_s_file_system_sharing_is_tolerated():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        made = loader(Numbers(6), 2, mode=DataLoaderMode.Async, num_workers=1)
        assert values(made) == [[0, 1], [2, 3], [4, 5]]
        made.terminate()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.spec("data", 30)
def test_forked_processes_do_not_need_the_program_s_threads():
    threads = torch.get_num_threads()
    made = loader(Numbers(6, (300, 300)), 2, opts=options(), mode=DataLoaderMode.Async)
    torch.set_num_threads(2)
    try:
        torch.ones(600, 600) @ torch.ones(600, 600)  # starts the pool, after the process
        assert [batch.shape for batch in made] == [(2, 300, 300)] * 3
    finally:
        torch.set_num_threads(threads)
