"""What a run was limited by, and how a loading process waits."""

import socket
from types import SimpleNamespace

import pytest

from poptorch._data import worker
from poptorch._data.channel import Channel, Kind
from poptorch._data.consumer import verdict


@pytest.mark.parametrize(
    "waited, total, text",
    [
        (0.01, 10.0, "(0%) went into waiting for data; the device limits the run, not the host"),
        (0.5, 10.0, "0.50 s of 10.00 s (5%) went into waiting for data; the host limits the run"),
        (4.0, 10.0, "(40%) went into waiting for data; the host limits the run, which could take"),
        (4.0, 10.0, "could take 6.00 s"),
        (0.0, 0.0, "(0%) went into waiting"),
    ],
)
def test_the_verdict(waited, total, text):
    assert text in verdict(waited, total)


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
