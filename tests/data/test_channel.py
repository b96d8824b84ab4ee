"""The channel between consumer and worker."""

import os
import socket

import pytest

from poptorch._data.channel import Channel, Kind


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
