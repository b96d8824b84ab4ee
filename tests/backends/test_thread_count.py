"""How many threads a call runs on, with a clock that says what each number costs."""

import logging
import operator
import threading
from collections import Counter

import pytest
import torch

from poptorch._base import log, process_settings
from poptorch.backends.thread_count import Threads


class Machine:
    """Lets time pass as the number of threads in force would."""

    def __init__(self, one: float, two: float, crowded: bool = False) -> None:
        self.now, self.one, self.two, self.crowded = 0.0, one, two, crowded
        self.threads = Threads(lambda: self.now, lambda: self.crowded)

    def call(self) -> int:
        return self.threads.run(self.work, 0, 0)

    def work(self, *_: int) -> int:
        number = torch.get_num_threads()
        self.now += self.one if number == 1 else self.two
        return number


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def test_a_trial_alternates_the_numbers_and_ends_with_the_faster_one() -> None:
    machine = Machine(one=1.0, two=2.0)

    calls = [machine.call() for _ in range(11)]

    assert "".join(map(str, calls)) == "21212" + "1" * 6


def test_the_number_that_was_chosen_is_known() -> None:
    machine = Machine(one=1.0, two=2.0)

    for _ in range(11):
        machine.call()

    assert machine.threads.chosen == 1


def test_a_new_number_of_threads_restarts_the_trial() -> None:
    machine = Machine(one=1.0, two=2.0)
    for _ in range(11):
        machine.call()

    torch.set_num_threads(3)

    assert machine.call() == 3


def test_deterministic_algorithms_run_on_the_number_that_the_user_set() -> None:
    machine = Machine(one=1.0, two=2.0)
    torch.use_deterministic_algorithms(True)

    calls = [machine.call() for _ in range(20)]

    assert Counter(calls) == {2: 20}


def test_after_an_exception_the_number_is_the_one_that_the_user_set() -> None:
    machine = Machine(one=1.0, two=2.0)
    for _ in range(11):
        machine.call()

    with pytest.raises(ZeroDivisionError):
        machine.threads.run(operator.truediv, 1, 0)

    assert torch.get_num_threads() == 2


def test_where_the_user_set_one_thread_nothing_is_tried() -> None:
    machine = Machine(one=1.0, two=2.0)
    torch.set_num_threads(1)

    calls = [machine.call() for _ in range(5)]

    assert calls == [1] * 5
    assert machine.threads.decision == ""


TWO = "with 2 threads: 1.00 ms a call, 2.00 ms a call with one"
ONE = "with one thread: 2.00 ms a call, 100.00 ms a call with 2"


@pytest.fixture
def decided() -> Machine:
    """Return a machine on which two threads are faster, after the trial."""
    machine = Machine(one=0.002, two=0.001)
    while not machine.threads.decision:
        machine.call()
    return machine


def test_a_trial_of_short_calls_takes_a_quarter_of_a_second(decided: Machine) -> None:
    assert 0.25 < decided.now < 0.26


def test_a_decision_says_what_calls_take_with_each_number(decided: Machine) -> None:
    assert decided.threads.decision == TWO


def test_the_faster_number_stays(decided: Machine) -> None:
    calls = [decided.call() for _ in range(1000)]

    assert Counter(calls) == {2: 1000}


def test_a_number_with_which_calls_become_slow_is_tried_again_and_replaced(
    decided: Machine,
) -> None:
    decided.two = 0.1

    soon = [decided.call() for _ in range(20)]
    later = [decided.call() for _ in range(1000)]

    assert soon.count(1) == 4 + 2  # in the trial, then chosen
    assert Counter(later) == {1: 1000}
    assert decided.threads.decision == ONE


def test_numbers_are_measured_again_after_a_long_time(decided: Machine) -> None:
    decided.two = 0.1
    for _ in range(1000):
        decided.call()
    decided.two = 0.001

    calls = [decided.call() for _ in range(12_000)]

    assert calls[-1] == 2


def test_the_log_has_each_decision_that_differs_from_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=log.engine.name)
    machine = Machine(one=0.002, two=0.001)

    for seconds in (0.001, 0.1, 0.001):
        machine.two = seconds
        for _ in range(13_000):
            machine.call()

    decisions = [text.partition("runs ")[2] for text in caplog.messages]
    assert decisions == [TWO, ONE, TWO]


def test_calls_use_one_thread_while_other_processes_need_the_cores() -> None:
    machine = Machine(one=0.1, two=0.05, crowded=True)

    calls = [machine.call() for _ in range(100)]

    assert Counter(calls) == {1: 100}
    assert machine.threads.decision == "with one thread, because other processes need the cores"


def test_several_threads_are_tried_once_other_processes_have_ended() -> None:
    machine = Machine(one=0.1, two=0.05, crowded=True)
    for _ in range(100):
        machine.call()
    machine.crowded = False

    calls = [machine.call() for _ in range(100)]

    assert calls[-50:] == [2] * 50


def test_several_threads_are_tried_after_half_a_minute_on_a_crowded_machine() -> None:
    machine = Machine(one=1.0, two=0.9, crowded=True)

    calls = [machine.call() for _ in range(60)]

    assert calls[:31] == [1] * 31
    assert calls[-10:] == [2] * 10


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

    def one(*_: int) -> None:
        assert torch.get_num_threads() == 1
        limited.set()
        thread.join(60)

    machine.threads.run(one, 0, 0)
    assert numbers == [2]


def test_memory_is_kept_unless_the_variable_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings, "_set_thresholds", lambda: True)
    assert process_settings.keep_freed_memory()
    monkeypatch.setenv("POPTORCH_KEEP_FREED_MEMORY", "0")
    assert not process_settings.keep_freed_memory()
