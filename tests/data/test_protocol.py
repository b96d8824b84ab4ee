"""The channel between consumer and worker."""

import os
import socket

import pytest
import torch

from poptorch._data.element import Form, TensorSpec
from poptorch._data.protocol import Channel, Failed, Kind, Ready


@pytest.fixture
def ends():
    pair = [Channel(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def test_messages_arrive_in_order_with_their_contents(ends):
    one, other = ends
    ready = Ready(Form(list), (TensorSpec((2, 3), torch.float16),))
    one.send(Kind.READY, content=ready)
    one.send(Kind.ITEM, slot=3, rows=1 << 40)
    one.send(Kind.ERROR, content=Failed("x" * 15_000))
    assert other.has_message()
    first, second, third = (other.receive() for _ in range(3))
    assert (first.kind, first.load()) == (Kind.READY, ready)
    assert (second.kind, second.slot, second.rows) == (Kind.ITEM, 3, 1 << 40)
    assert (third.kind, len(third.load().text)) == (Kind.ERROR, 15_000)
    assert not other.has_message()


def test_a_message_larger_than_the_socket_s_buffer(ends):
    one, other = ends
    pid = os.fork()
    if pid == 0:
        one.send(Kind.READY, content=bytes(3_000_000))
        os._exit(0)
    assert len(other.receive().load()) == 3_000_000
    os.waitpid(pid, 0)


def test_the_end_of_the_other_process(ends):
    one, other = ends
    one.send(Kind.STOP)
    one.close()
    assert other.has_message(None)
    assert other.receive().kind is Kind.STOP
    assert other.has_message(None)
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(ConnectionError):
        other.send(Kind.FREE)


def test_waiting_ends_when_a_watched_descriptor_is_ready(ends):
    readable, writable = os.pipe()
    try:
        ends[0].watch(readable)
        assert not ends[0].has_message(0.01)
        os.write(writable, b"x")
        assert not ends[0].has_message(None)
        ends[1].send(Kind.FREE)
        assert ends[0].has_message(None)
    finally:
        os.close(readable)
        os.close(writable)
