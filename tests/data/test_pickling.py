"""Sending data sets to other processes."""

import gc
import os
from multiprocessing import context

import numpy as np
import pytest
import torch

from helpers.leaks import nothing_left
from poptorch._data.process import Pickled


class Descriptor:
    """A descriptor that has arrived."""

    def __init__(self, number):
        self.number = number

    def detach(self):
        return self.number


class Starting:
    """Stands for a process that is being started: gives descriptors to it."""

    def duplicate_for_child(self, descriptor):
        return os.dup(descriptor)

    def DupFd(self, descriptor):  # noqa: N802
        return Descriptor(descriptor)


class Direct:
    """Loads as the receiving process would, in this one."""

    def __init__(self, value, on_disk=False):
        self.pickled = Pickled(value, on_disk)
        context.set_spawning_popen(Starting())
        try:
            build, arguments = self.pickled.__reduce__()
        finally:
            context.set_spawning_popen(None)
        self.received = build(*arguments)

    def load(self):
        value = self.received()
        self.pickled.close()
        return value


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
def test_values_arrive_and_nothing_stays(on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    many = [torch.tensor([float(i)]) for i in range(2000)]
    value = {
        "many": many,
        "big": torch.arange(100_000).reshape(100, 1000),
        "half": torch.ones(3, dtype=torch.float16),
        "bool": torch.tensor([True, False]),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "array": np.arange(10),
        "text": "abc",
    }
    with nothing_left():
        direct = Direct(value, on_disk)
        assert os.listdir(tmp_path) == []
        got = direct.load()
        assert os.listdir(tmp_path) == []
        assert torch.equal(torch.cat(got["many"]), torch.cat(many))
        for key in ("big", "half", "bool", "transposed", "scalar", "empty"):
            assert torch.equal(got[key], value[key]), key
            assert got[key].dtype == value[key].dtype
        assert np.array_equal(got["array"], value["array"])
        assert got["text"] == "abc"
        got["big"].fill_(1)  # its own copy, and writable
        got["array"][0] = 7
        assert value["big"][0, 1] == 1
        assert value["big"][0, 2] == 2
        del got, direct
        gc.collect()


def test_tensors_in_shared_memory_stay_shared():
    shared, own = torch.zeros(2).share_memory_(), torch.zeros(2)
    direct = Direct((shared, own))
    shared.fill_(1)
    own.fill_(1)
    got_shared, got_own = direct.load()
    assert got_shared.tolist() == [1, 1]
    assert got_own.tolist() == [0, 0]


def test_a_tensor_that_occurs_twice_is_sent_once():
    tensor = torch.ones(1000)
    first, second = Direct([tensor, tensor]).load()
    assert first is second


@pytest.mark.slow
def test_expanded_tensors_are_not_blown_up():
    with nothing_left():
        expanded = torch.ones(1).expand(10_000_000)
        got = Direct(expanded).load()
        assert got.stride() == (0,)
        assert got[5] == 1
        del got, expanded


def test_gradients_are_kept():
    weight = torch.nn.Parameter(torch.ones(3))
    got = Direct(weight).load()
    assert got.requires_grad
    assert got.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_what_cannot_be_pickled_says_so():
    with nothing_left(), pytest.raises(AttributeError, match="lambda"):
        Direct(lambda: None)
