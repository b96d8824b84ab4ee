"""The loading process and its consumer: messages, waiting, what is left in shared memory."""

import os
import socket
from types import SimpleNamespace

import pytest

from poptorch._data import worker
from poptorch._data.channel import Channel, Kind
from poptorch._data.consumer import verdict
from poptorch._data.process import Process


@pytest.fixture
def ends():
    both = [Channel(end) for end in socket.socketpair(type=socket.SOCK_SEQPACKET)]
    yield both
    for end in both:
        end.close()


def test_what_does_not_fit_is_cut_off_in_front(ends):
    one, other = ends
    one.send(Kind.ITEM, slot=3, rows=1 << 40)
    one.send(Kind.ERROR, text="x" * 100_000 + "\udc80")
    assert other.receive() == (Kind.ITEM, 3, 1 << 40, "")
    text = other.receive().text
    assert text == "x" * (len(text) - 6) + "\\udc80"
    assert 40_000 < len(text) < 100_000
    assert other.receive(0.0) is None


@pytest.mark.parametrize("has_unread", [False, True])
def test_the_end_of_the_other_process(ends, has_unread):
    one, other = ends
    one.send(Kind.STOP)
    if has_unread:
        other.send(Kind.FREE)
    one.close()
    assert other.receive().kind is Kind.STOP
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    with pytest.raises(ConnectionError):
        other.send(Kind.FREE)


def test_waiting_ends_when_a_watched_descriptor_is_ready(ends):
    readable, writable = os.pipe()
    try:
        ends[0].watch(readable)
        assert ends[0].receive(0.01) is None
        os.write(writable, b"x")
        assert ends[0].receive() is None
        ends[1].send(Kind.FREE)
        assert ends[0].receive().kind is Kind.FREE
    finally:
        os.close(readable)
        os.close(writable)


@pytest.mark.parametrize("waited, total, text", [
    (0.01, 10.0, "(0%) went into waiting for data; the device limits the run, not the host"),
    (4.0, 10.0, "the host limits the run, which could take 6.00 s"),
    (0.0, 0.0, "(0%) went into waiting"),
])  # fmt: skip
def test_the_verdict(waited, total, text):
    assert text in verdict(waited, total)


def test_pauses_get_longer_until_a_message_ends_them(monkeypatch):
    ours, theirs = map(Channel, socket.socketpair(type=socket.SOCK_SEQPACKET))
    loading = object.__new__(worker._Worker)
    loading._channel, loading._published, loading._freed = theirs, 2, 0
    loading._settings = SimpleNamespace(pause=0.001, slots=2)
    loading._slots = ["first", "second"]
    passed, asked = [], theirs.receive
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=passed.append))

    def woken(seconds=None):
        if seconds is None:
            passed.append("until a message comes")
            ours.send(Kind.FREE)
        return asked(seconds)

    monkeypatch.setattr(theirs, "receive", woken)
    assert loading._claim() == "first"
    assert passed == [0.001, 0.002, 0.004, "until a message comes"]
    ours.close()
    theirs.close()


def test_only_what_the_ended_processes_left_is_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path)
    if (ended := os.fork()) == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    gone, other, alive = f"torch_{ended}_1_2", "torch_12_3", f"torch_{os.getpid()}_5_6"
    for name in (gone, other, alive, f"mine_{ended}_1", "torch"):
        (tmp_path / name).touch()
    assert worker.remove_segments({ended, os.getpid()}) == {os.getpid()}
    assert not (tmp_path / gone).exists()
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(worker, "_SHARED_MEMORY", tmp_path / "none")
    assert worker.remove_segments({ended}) == set()


@pytest.mark.parametrize(
    ("code", "said"), [(None, "closed its connection"), (0, "exit code 0"), (-9, "by SIGKILL")]
)
def test_how_the_loading_process_ended_is_described(code: int | None, said: str) -> None:
    process = SimpleNamespace(exitcode=code, join=lambda limit: None)
    assert said in Process.describe_end(SimpleNamespace(_process=process))
