"""What a run was limited by."""

import socket
from types import SimpleNamespace

import pytest

from helpers.data_sets import Numbers
from helpers.loaders import FORK
from poptorch._data import consumer, worker
from poptorch._data.channel import Channel, Kind
from poptorch._data.consumer import verdict
from poptorch.dataloader import AsynchronousDataAccessor


@pytest.mark.parametrize(
    "waited, total, text",
    [
        (0.01, 10.0, "(0%) went into waiting for data; the device limits the run, not the host"),
        (4.0, 10.0, "(40%) went into waiting for data; the host limits the run, which could take"),
        (0.0, 0.0, "(0%) went into waiting"),
    ],
)
def test_the_verdict(waited, total, text):
    assert text in verdict(waited, total)
    if waited == 4.0:
        assert verdict(waited, total).endswith("6.00 s")


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(consumer, "time", made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "loading, computing, spent, limit",
    [
        (1.0, 0.0, "21.00 s of 21.00 s (100%)", "the host limits the run"),
        (0.0, 1.0, "0.00 s of 20.00 s (0%)", "the device limits"),
    ],
)
def test_every_epoch_ends_with_a_verdict_at_debug(
    loading, computing, spent, limit, clock, monkeypatch, caplog
):
    caplog.set_level("DEBUG", logger="poptorch::python")
    made = AsynchronousDataAccessor(Numbers(20), **FORK)
    receive = made._consumer._message

    def slow():
        clock.now += loading
        return receive()

    monkeypatch.setattr(made._consumer, "_message", slow)
    for _ in made:
        clock.now += computing
    assert f"20 elements: {spent}" in caplog.text
    assert limit in caplog.text


def test_pauses_get_longer_until_a_message_ends_them(monkeypatch):
    """Of a loading process whose two buffers are full."""
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
