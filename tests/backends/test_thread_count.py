"""How many threads a call runs on, with a clock that says what each number costs."""

import logging
import threading

import pytest
import torch

from poptorch._base import log
from poptorch.backends import process_settings
from poptorch.backends.thread_count import Threads


class Machine:
    """Lets time pass as the number of threads in force would."""

    def __init__(self, one: float, two: float) -> None:
        self.now, self.one, self.two = 0.0, one, two
        self.threads = Threads(lambda: self.now)

    def call(self) -> int:
        return self.threads.run(self.work)

    def work(self) -> int:
        number = torch.get_num_threads()
        self.now += self.one if number == 1 else self.two
        return number


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def test_a_new_number_of_threads_restarts_the_trial_and_determinism_stops_it() -> None:
    machine = Machine(one=1.0, two=2.0)
    assert [machine.call() for _ in range(11)][-1] == machine.threads.chosen == 1
    torch.set_num_threads(3)
    assert machine.call() == 3
    torch.use_deterministic_algorithms(True)
    assert {machine.call() for _ in range(20)} == {3}
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ZeroDivisionError):
        machine.threads.run(lambda: 1 / 0)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert machine.call() == 1
    assert machine.threads.decision == ""


def test_the_faster_number_stays_until_calls_become_slow_or_it_is_measured_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=log.engine.name)
    machine = Machine(one=0.002, two=0.001)
    while not machine.threads.decision:
        machine.call()
    assert 0.25 < machine.now < 0.26
    decided = "with 2 threads: 1.00 ms a call, 2.00 ms a call with one"
    assert {machine.call() for _ in range(1000)} == {2}
    machine.two = 0.1
    assert [machine.call() for _ in range(20)].count(1) == 4 + 2  # tried, taken
    fallen = "with one thread: 2.00 ms a call, 100.00 ms a call with 2"
    assert {machine.call() for _ in range(1000)} == {1}
    assert machine.threads.decision == fallen
    machine.two = 0.001
    assert [machine.call() for _ in range(12_000)][-1] == 2
    assert machine.threads.decision == decided
    assert [text.partition("runs ")[2] for text in caplog.messages] == [decided, fallen, decided]


@pytest.mark.parametrize(
    "one, two, calls, reason",
    [
        (4e-5, 3e-5, [2] + [1] * 8, "one thread: 0.04 ms a call"),
        (3.0, 2.0, [2, 1, 2, 2, 2], "2 threads: 2000.00 ms a call, 3000.00 ms a call with one"),
        (3.0, 2.9, [2, 1, 2, 1, 2], "2 threads: 2900.00 ms a call, 3000.00 ms a call with one"),
        (3.0, 4.0, [2, 1, 2, 1, 2, 1], "one thread: 3000.00 ms a call, 4000.00 ms a call with 2"),
    ],
)
def test_short_calls_and_calls_that_threads_clearly_help_are_not_tried_for_long(
    one: float, two: float, calls: list[int], reason: str
) -> None:
    machine = Machine(one, two)
    assert [machine.call() for _ in calls] == calls
    assert machine.threads.decision == f"with {reason}"


def test_a_number_that_another_thread_sets_is_kept() -> None:
    """Torch lets a thread begin with the process's number where it first looks at it."""
    numbers: list[int] = []
    limited, chosen = threading.Event(), threading.Event()

    def other() -> None:
        torch.set_num_threads(2)
        chosen.set()
        limited.wait(60)
        numbers.append(torch.get_num_threads())

    thread, machine = threading.Thread(target=other), Machine(one=1.0, two=2.0)
    machine.call()
    thread.start()
    chosen.wait(60)

    def one() -> None:
        assert torch.get_num_threads() == 1
        limited.set()
        thread.join(60)

    machine.threads.run(one)
    assert numbers == [2]


def test_memory_is_kept_unless_the_variable_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings, "_set_thresholds", lambda: True)
    assert process_settings.keep_freed_memory()
    monkeypatch.setenv("POPTORCH_KEEP_FREED_MEMORY", "0")
    assert not process_settings.keep_freed_memory()
