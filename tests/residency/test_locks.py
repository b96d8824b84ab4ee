"""The lock of a set of models: sets that are joined exclude one another from then on."""

from concurrent import futures

import pytest
import torch

from poptorch._residency import Device, Lock


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
