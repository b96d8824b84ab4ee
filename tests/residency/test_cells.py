"""The coherence table, compared with a model of ten lines."""

import functools
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import nn

from helpers.modes import MODES
from poptorch._base.user_modes import without_user_modes
from poptorch._residency import (
    TABLE,
    Coherence,
    CopyDirection,
    DeviceCopies,
    Event,
    Lock,
    unwatched,
)

PATHS = ("w",)
EITHER = st.integers(0, 1)
UNDER = st.sampled_from([mode for name, mode in MODES.items() if "meta" not in name])
Mode = Callable[[], AbstractContextManager[object]]
"""What a user may be inside of, such as ``torch.inference_mode``."""


class Machine(RuleBasedStateMachine):
    """Two models that train one weight.

    Attributes:
        newest: what a reader must see.
        on_host: what the host's memory holds while one of the devices is newer.
        newer: which device is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.Parameter(torch.zeros(1))
        self.step = 0.0
        self.values = [torch.zeros(1), torch.zeros(1)]
        self.devices = [DeviceCopies(functools.partial(self.read, at), True) for at in (0, 1)]
        for device in self.devices:
            device.meet({"w": self.host})
        self.newest = self.on_host = 0.0
        self.newer: int | None = None

    def move(self, at: int, event: Event) -> None:
        """Make the transfers that the table asks for, as an executor does."""
        with without_user_modes():
            for _ in self.devices[at].due(event, PATHS):
                row = TABLE[event, self.devices[at].state("w")]
                ends = (self.host, self.values[at])
                to, source = ends if row.transfer is CopyDirection.DOWN else ends[::-1]
                unwatched(torch.Tensor.copy_, to, source)
                self.devices[at].moved(event, {"w": (self.host, self.values[at])})

    def read(self, at: int) -> None:
        self.move(at, Event.READ)

    def copied_to_host(self) -> None:
        """The host has the newest values."""
        self.on_host = self.newest
        self.newer = None

    @rule(at=EITHER, mode=UNDER)
    def call(self, at: int, mode: Mode) -> None:
        with mode():
            self.train(at)

    def train(self, at: int) -> None:
        self.devices[at].fetch()
        self.move(at, Event.CALL)
        assert self.values[at] == self.newest
        self.on_host = self.on_host if self.newer == at else self.newest
        self.step += 1.0
        self.values[at].fill_(self.step)
        self.devices[at].updated(Event.UPDATE, PATHS)
        self.newest = self.step
        self.newer = at

    @rule(mode=UNDER)
    def read_on_host(self, mode: Mode) -> None:
        assert (type(self.host) is not nn.Parameter) == (self.newer is not None)
        with mode():
            assert self.host.item() == self.newest
        assert type(self.host) is nn.Parameter
        self.copied_to_host()

    @rule()
    def replace_memory(self) -> None:
        self.host.data = self.host.detach().clone()
        self.copied_to_host()

    @rule(at=EITHER, mode=UNDER)
    def copy_to_host(self, at: int, mode: Mode) -> None:
        with mode():
            self.fetch_to_host(at)

    def fetch_to_host(self, at: int) -> None:
        if self.devices[at].state("w") is Coherence.HOST_ONLY:
            return  # nothing is on this device
        self.devices[at].fetch()
        self.move(at, Event.COPY_TO_HOST)
        self.copied_to_host()
        assert self.host.item() == self.newest

    @rule(at=EITHER, mode=UNDER)
    def copy_to_device(self, at: int, mode: Mode) -> None:
        if self.devices[at].state("w") is not Coherence.HOST_ONLY and self.newer == at:
            self.newest = self.on_host  # what it trained is gone
            self.newer = None
        with mode():
            self.move(at, Event.COPY_TO_DEVICE)

    @rule(at=EITHER, mode=UNDER)
    def detach(self, at: int, mode: Mode) -> None:
        with mode():
            self.move(at, Event.DETACH)
            self.devices[at].clear()
        if self.newer == at:
            self.copied_to_host()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTwoDevices = Machine.TestCase


def devices(*trains: bool) -> list[DeviceCopies]:
    """Devices, each of which shares a tensor with the one before and with the one behind it.

    Args:
        trains: whether each of them trains.
    """
    hosts = [torch.ones(1) for _ in range(len(trains) + 1)]
    made = [DeviceCopies(lambda: None, trained) for trained in trains]
    for device, before, after in zip(made, hosts, hosts[1:], strict=False):
        device.meet({"before": before, "after": after})
    return made


def excludes(one: Lock, two: Lock) -> bool:
    """Whether a thread waits for the one while another has the other."""
    with futures.ThreadPoolExecutor(1) as thread, one():
        return not futures.wait([thread.submit(two.run, int, 0)], 0.05).done


def test_models_that_a_trainer_connects_have_one_lock() -> None:
    first, second, third = devices(False, True, False)

    assert [len(device.near) for device in (first, second, third)] == [1, 2, 1]
    assert excludes(first.lock, third.lock)


def test_models_that_do_not_train_have_separate_locks() -> None:
    first, second, third = devices(False, False, False)

    assert [len(device.near) for device in (first, second, third)] == [0, 0, 0]
    assert not excludes(first.lock, third.lock)


def test_a_collected_model_connects_no_others() -> None:
    first, second, _third = devices(False, True, False)
    assert len(first.near) == 1

    del second

    assert not first.near


class Interrupted:
    """A lock: another thread does something right before it is taken for the first time."""

    def __init__(self, lock: Any, before: Callable[[], None]) -> None:
        self._lock, self._before = lock, [before]

    def __enter__(self) -> bool:
        if self._before:
            self._before.pop()()
        return bool(self._lock.__enter__())

    def __exit__(self, *failure: object) -> None:
        self._lock.__exit__(*failure)

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


@pytest.mark.parametrize("held", [0, 1])
def test_a_lock_that_is_joined_while_a_thread_is_about_to_take_it_is_taken_with_the_other(
    held: int,
) -> None:
    locks = Lock(), Lock()
    locks[held]._held = Interrupted(locks[held]._held, lambda: locks[0].join(locks[1]))

    other_is_held = locks[held].run(lambda other: other._root()._held._is_owned(), locks[1 - held])

    assert other_is_held


@pytest.mark.parametrize("own", [0, 1])
def test_a_thread_that_holds_one_of_two_joined_locks_excludes_all_others(own: int) -> None:
    locks = Lock(), Lock()

    with futures.ThreadPoolExecutor(1) as thread, locks[own]():
        locks[0].join(locks[1])
        waiting = [thread.submit(lock.run, int, 0) for lock in locks]
        entered = futures.wait(waiting, 0.05, futures.FIRST_COMPLETED).done

    assert not entered
    assert excludes(*locks)
