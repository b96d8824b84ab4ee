"""Loading processes: which samples they read, their messages, and the warnings about loaders."""

import os
import pickle
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import poptorch
from helpers import loaders
from helpers.data_sets import Numbers
from helpers.wrapping import options
from poptorch._data import producer
from poptorch._data.channel import Connection, MessageKind
from poptorch._data.consumer import verdict
from poptorch._data.loading_process import LoadingProcess
from poptorch._data.sharding import DataShard, permutation


@pytest.fixture
def ends() -> Iterator[list[Connection]]:
    both = [Connection(end) for end in socket.socketpair(type=socket.SOCK_SEQPACKET)]
    yield both
    for end in both:
        end.close()


def test_a_long_error_text_loses_its_beginning(ends: list[Connection]) -> None:
    one, other = ends
    one.send(MessageKind.ITEM, slot=3, rows=1 << 40)
    one.send(MessageKind.ERROR, text="x" * 100_000 + "\udc80")
    assert other.receive() == (MessageKind.ITEM, 3, 1 << 40, "")
    text = other.receive().text
    assert text == "x" * (len(text) - 6) + "\\udc80"
    assert 40_000 < len(text) < 100_000
    assert other.receive(0.0) is None


@pytest.mark.parametrize("has_unread", [False, True])
def test_a_channel_reports_the_end_of_the_other_process(
    ends: list[Connection], has_unread: bool
) -> None:
    one, other = ends
    one.send(MessageKind.STOP)
    if has_unread:
        other.send(MessageKind.FREE)
    one.close()
    assert other.receive().kind is MessageKind.STOP
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    with pytest.raises(ConnectionError):
        other.send(MessageKind.FREE)


def test_waiting_ends_when_a_watched_descriptor_is_ready(ends: list[Connection]) -> None:
    readable, writable = os.pipe()
    try:
        ends[0].watch(readable)
        assert ends[0].receive(0.01) is None
        os.write(writable, b"x")
        assert ends[0].receive() is None
        ends[1].send(MessageKind.FREE)
        assert ends[0].receive().kind is MessageKind.FREE
    finally:
        os.close(readable)
        os.close(writable)


@pytest.mark.parametrize(
    "waited, total, text",
    [
        (0.01, 10.0, "took 0.01 s of 10.00 s (0%). The device limits the run, not the host"),
        (4.0, 10.0, "The host limits the run: it would take 6.00 s without waiting"),
        (0.0, 0.0, "waiting for data took 0.00 s of 0.00 s (0%)"),
    ],
)
def test_the_verdict_says_whether_the_device_or_the_host_limits_the_run(
    waited: float, total: float, text: str
) -> None:
    assert text in verdict(waited, total)


def test_pauses_get_longer_until_a_message_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = map(Connection, socket.socketpair(type=socket.SOCK_SEQPACKET))
    loading = object.__new__(producer._Producer)
    loading._channel, loading._published, loading._freed = theirs, 2, 0
    loading._settings = SimpleNamespace(pause=0.001, slots=2)
    loading._slots = ["first", "second"]
    passed, asked = [], theirs.receive
    monkeypatch.setattr(producer, "time", SimpleNamespace(sleep=passed.append))

    def woken(seconds: float | None = None) -> tuple[Any, ...]:
        if seconds is None:
            passed.append("until a message comes")
            ours.send(MessageKind.FREE)
        return asked(seconds)

    monkeypatch.setattr(theirs, "receive", woken)
    assert loading._claim() == "first"
    assert passed == [0.001, 0.002, 0.004, "until a message comes"]
    ours.close()
    theirs.close()


def test_only_files_of_ended_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_SHARED_MEMORY", tmp_path)
    if (ended := os.fork()) == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    gone, other, alive = f"torch_{ended}_1_2", "torch_12_3", f"torch_{os.getpid()}_5_6"
    for name in (gone, other, alive, f"mine_{ended}_1", "torch"):
        (tmp_path / name).touch()
    assert producer.remove_segments({ended, os.getpid()}) == {os.getpid()}
    assert not (tmp_path / gone).exists()
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(producer, "_SHARED_MEMORY", tmp_path / "none")
    assert producer.remove_segments({ended}) == set()


@pytest.mark.parametrize(
    ("code", "description"),
    [(None, "closed its connection"), (0, "exit code 0"), (-9, "by SIGKILL")],
)
def test_how_the_loading_process_ended_is_described(code: int | None, description: str) -> None:
    process = SimpleNamespace(exitcode=code, join=lambda limit: None)
    assert description in LoadingProcess.describe_end(SimpleNamespace(_process=process))


class Batched(Numbers):
    classes = ("cat", "dog")

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(float(-i)) for i in indices]


@pytest.mark.parametrize(
    "n, others", [(250, {}), (250, {"shuffle": True}), (192, {"drop_last": False})]
)
def test_a_process_that_does_the_work_of_two_reads_their_samples(
    n: int, others: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(process: int, processes: int) -> list[torch.Tensor]:
        opts = loaders.options(2, 2, 3, process=process, processes=processes, seed=1)
        made = loaders.loader(torch.arange(n), 2, opts=opts, **others)
        return [batch.view(2, 3, 4 // processes, 4) for batch in made]  # iteration, step, process

    of_four = [torch.cat(parts, 2) for parts in zip(*(read(i, 4) for i in range(4)), strict=True)]
    monkeypatch.setenv("POPDIST_PROCESSES_EACH", "2")
    of_two = [torch.cat(parts, 2) for parts in zip(*(read(i, 2) for i in range(2)), strict=True)]
    assert len(of_two) == n // 96
    assert all(map(torch.equal, of_two, of_four))
    alone = loaders.options(2)
    alone.Distributed.disable()
    assert loaders.loader(torch.arange(8), 1, opts=alone).combinedBatchSize == 2


@pytest.fixture
def shard() -> DataShard:
    """The samples 3 to 6 of ten numbers."""
    return DataShard(Numbers(10), range(3, 7))


def test_a_sample_of_a_shard_is_found_by_its_place_from_either_end(shard: DataShard) -> None:
    assert [shard[at].item() for at in (0, 3, -1)] == [3, 6, 6]


@pytest.mark.parametrize("at", [4, -5])
def test_a_place_outside_of_a_shard_is_refused(at: int, shard: DataShard) -> None:
    with pytest.raises(IndexError, match="shard of 4 samples"):
        shard[at]


def test_a_shard_can_be_iterated(shard: DataShard) -> None:
    assert [sample.item() for sample in list(shard)] == [3, 4, 5, 6]


def test_a_shard_returns_several_samples_in_the_order_asked_for(shard: DataShard) -> None:
    assert [sample.item() for sample in shard.__getitems__([2, 0])] == [5, 3]


def test_a_pickled_shard_has_the_same_samples(shard: DataShard) -> None:
    assert pickle.loads(pickle.dumps(shard))[0].item() == 3


def test_a_shard_of_samples_in_another_order_has_them_in_that_order() -> None:
    turned = DataShard(Numbers(6), range(2, 5), torch.arange(6).flip(0))

    assert [turned[at].item() for at in range(3)] == [3, 2, 1]


def test_a_shard_reads_several_samples_at_once_where_the_data_set_can() -> None:
    shard = DataShard(Batched(10), range(3, 7))

    assert [sample.item() for sample in shard.__getitems__([0, 1])] == [-3, -4]


def test_a_shard_has_the_attributes_of_the_data_set_and_no_others() -> None:
    shard = DataShard(Batched(10), range(3, 7))

    assert shard.classes == ("cat", "dog")
    with pytest.raises(AttributeError):
        _ = shard.unknown


@pytest.mark.spec("data", 15)
def test_two_permutations_cover_everything_and_all_differ() -> None:
    rng = random.Random(2)
    for _ in range(100):
        used = rng.randrange(1, 40)
        samples = used + rng.randrange(0, used)
        epochs = [permutation(samples, used, 7, index) for index in range(4)]
        for index, order in enumerate(epochs):
            assert sorted(order.tolist()) == list(range(samples))
            assert torch.equal(order, permutation(samples, used, 7, index))
        for first, second in ((0, 1), (2, 3)):
            seen = {*epochs[first][:used].tolist(), *epochs[second][:used].tolist()}
            assert seen == set(range(samples))
    orders = {tuple(permutation(20, 16, s, i).tolist()) for s in (-1, 0, 1, 2) for i in range(4)}
    assert len(orders) == 16  # seeds give sequences of their own


SAMPLES = TensorDataset(torch.randn(32, 3), torch.randn(32, 2))


def wrapped(opts: poptorch.Options) -> poptorch.PoplarExecutor:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, opts, optimizer, loss=torch.nn.MSELoss())


def loader(
    mode: poptorch.DataLoaderMode = poptorch.DataLoaderMode.Sync, **counts: int
) -> poptorch.DataLoader:
    return loaders.loader(SAMPLES, 2, opts=options(**counts), mode=mode)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* use of fork")
@pytest.mark.parametrize("mode", poptorch.DataLoaderMode)
def test_one_warning_says_that_a_model_divides_batches_differently(
    mode: poptorch.DataLoaderMode, caplog: pytest.LogCaptureFixture
) -> None:
    data, executor = loader(mode, iterations=2, accumulation=2), wrapped(options())
    for _ in range(2):
        for batch in data:
            executor(*batch)
    data.terminate()
    description = (
        "assembled this batch of 8 samples from 4 micro-batches of 2, but the model divides it "
    )
    assert caplog.text.count(description + "into 1 micro-batches of 8") == 1
    caplog.clear()
    executor = wrapped(options())
    for batch in loader(mode, accumulation=4):  # which only the loop holds
        executor(*batch)
    assert "from 4 micro-batches of 2" in caplog.text


@pytest.mark.larger("test_one_warning_says_that_a_model_divides_batches_differently")
def test_equal_counts_other_batches_and_inference_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accessor = poptorch.AsynchronousDataAccessor(loader(accumulation=4))
    wrapped(options(accumulation=4))(*next(iter(accessor)))
    accessor.terminate()
    for counts in ({"iterations": 4}, {"accumulation": 4}):  # the loader cuts both alike
        executor = wrapped(options(iterations=2, accumulation=2))
        for batch in loader(**counts):
            executor(*batch)
    data = loader(accumulation=4)
    batch = next(iter(data))
    wrapped(options())(batch[0][:4], batch[1][:4])
    model = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())
    assert [model(x).shape for x, _ in data] == [(8, 2)] * 4
    gone = [*loader(accumulation=2)]
    wrapped(options())(*gone[0])
    assert "DataLoader" not in caplog.text
