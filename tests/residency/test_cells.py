"""The coherence table, beside a model of ten lines."""

import functools
from concurrent import futures

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import nn

from helpers.modes import MODES
from poptorch._base.plainly import plainly
from poptorch._residency import TABLE, Device, Event, Lock, State, Transfer, unwatched

PATHS = ("w",)
EITHER = st.integers(0, 1)
UNDER = st.sampled_from([mode for name, mode in MODES.items() if "meta" not in name])


class Machine(RuleBasedStateMachine):
    """Two models that train one weight.

    Attributes:
        newest: what a reader must see.
        on_host: what the host's memory holds while one of the devices is newer.
        newer: which device is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host, self.step = nn.Parameter(torch.zeros(1)), 0.0
        self.values = [torch.zeros(1), torch.zeros(1)]
        self.devices = [Device(functools.partial(self.read, at), True) for at in (0, 1)]
        for device in self.devices:
            device.meet({"w": self.host})
        self.newest = self.on_host = 0.0
        self.newer: int | None = None

    def move(self, at: int, event: Event) -> None:
        with plainly():
            for _ in self.devices[at].due(event, PATHS):
                row = TABLE[event, self.devices[at].state("w")]
                ends = (self.host, self.values[at])
                to, source = ends if row.transfer is Transfer.DOWN else ends[::-1]
                unwatched(torch.Tensor.copy_, to, source)
                self.devices[at].moved(event, {"w": (self.host, self.values[at])})

    def read(self, at: int) -> None:
        self.move(at, Event.READ)

    def came_down(self) -> None:
        self.on_host, self.newer = self.newest, None

    @rule(at=EITHER, mode=UNDER)
    def call(self, at: int, mode) -> None:
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
        self.newest, self.newer = self.step, at

    @rule(mode=UNDER)
    def look(self, mode) -> None:
        assert (type(self.host) is not nn.Parameter) == (self.newer is not None)
        with mode():
            assert self.host.item() == self.newest
        assert type(self.host) is nn.Parameter
        self.came_down()

    @rule()
    def give_other_memory(self) -> None:
        self.host.data = self.host.detach().clone()
        self.came_down()

    @rule(at=EITHER, mode=UNDER)
    def copy_to_host(self, at: int, mode) -> None:
        with mode():
            self.fetch_to_host(at)

    def fetch_to_host(self, at: int) -> None:
        if self.devices[at].state("w") is State.HOST_ONLY:
            return  # nothing is on this device
        self.devices[at].fetch()
        self.move(at, Event.COPY_TO_HOST)
        self.came_down()
        assert self.host.item() == self.newest

    @rule(at=EITHER, mode=UNDER)
    def copy_to_device(self, at: int, mode) -> None:
        if self.devices[at].state("w") is not State.HOST_ONLY and self.newer == at:
            self.newest, self.newer = self.on_host, None  # what it trained is gone
        with mode():
            self.move(at, Event.COPY_TO_DEVICE)

    @rule(at=EITHER, mode=UNDER)
    def detach(self, at: int, mode) -> None:
        with mode():
            self.move(at, Event.DETACH)
            self.devices[at].clear()
        if self.newer == at:
            self.came_down()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTwoDevices = Machine.TestCase


def devices(*trains: bool) -> list[Device]:
    """Return one for each pair of neighbours of a row of tensors; so that all are connected."""
    hosts = [torch.ones(1) for _ in range(len(trains) + 1)]
    made = [Device(lambda: None, trained) for trained in trains]
    for device, before, after in zip(made, hosts, hosts[1:], strict=False):
        device.meet({"before": before, "after": after})
    return made


def excludes(one: Lock, two: Lock) -> bool:
    """Whether a thread waits for the one while another has the other."""
    with futures.ThreadPoolExecutor(1) as thread, one():
        return not futures.wait([thread.submit(two.run, int)], 0.05).done


@pytest.mark.parametrize("middle", [True, False])
def test_models_that_a_trainer_connects_have_one_lock(middle: bool) -> None:
    first, second, third = devices(False, middle, False)
    assert [len(device.near) for device in (first, second, third)] == [middle, 2 * middle, middle]
    assert excludes(first.lock, third.lock) == middle
    del second
    assert not first.near


@pytest.mark.parametrize("held", [0, 1])
def test_a_lock_that_is_joined_while_a_thread_is_about_to_take_it(held: int, monkeypatch) -> None:
    locks = Lock(), Lock()
    chosen, root = [], Lock._root

    def joined_afterwards(self):
        lock = root(self)
        if not chosen:
            chosen.append(lock)
            locks[0].join(locks[1])
        return lock

    monkeypatch.setattr(Lock, "_root", joined_afterwards)
    assert locks[held].run(lambda: root(locks[1 - held])._held._is_owned())


def test_who_is_in_a_model_that_is_joined_stays_alone_in_it() -> None:
    for own in (0, 1):
        locks = Lock(), Lock()
        with futures.ThreadPoolExecutor(1) as thread, locks[own]():
            locks[0].join(locks[1])
            waiting = [thread.submit(lock.run, int) for lock in locks]
            assert not futures.wait(waiting, 0.05, futures.FIRST_COMPLETED).done
        assert excludes(*locks)
