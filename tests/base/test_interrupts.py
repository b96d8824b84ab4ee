"""What a handler of a signal raises reaches the script, whatever drops it on the way."""

import functools
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import programs
from helpers.patience import eventually
from poptorch._base import interrupts


class Target:
    """Something that can be referred to weakly."""


class AlarmError(Exception):
    """The exception that a script's own handler raises."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interrupts, "_RESEND_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def forever() -> None:
    """Wait for an exception; without one, fail."""
    assert not eventually(lambda: False, 10.0)


def dropped_by_a_callback() -> None:
    """The locks of imports do this: Python prints "Exception ignored in"."""
    target = Target()
    reference = weakref.ref(target, lambda _: press())
    del target
    gc.collect()
    assert reference() is None


def dropped_by_code_that_goes_on() -> None:
    try:
        press()
    except BaseException:
        return


def dropped_again_and_again() -> None:
    for _ in range(3):
        try:
            press()
            forever()
        except BaseException:
            continue


DROPS = [dropped_by_a_callback, dropped_by_code_that_goes_on, dropped_again_and_again]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("drop", DROPS)
def test_an_interrupt_that_was_dropped_is_raised_again_before_the_block_ends(
    drop: Callable[[], None],
) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.delivering():
        drop()
        forever()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("drop", DROPS)
def test_an_interrupt_that_was_dropped_is_raised_at_the_latest_when_the_block_ends(
    drop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_RESEND_SECONDS", 100.0 if drop is not DROPS[2] else 0.01)
    with pytest.raises(KeyboardInterrupt), interrupts.delivering():
        drop()


def test_an_interrupt_that_was_turned_into_another_error_is_raised_as_an_interrupt() -> None:
    def compile_something() -> None:
        try:
            press()
        except BaseException as error:
            raise RuntimeError("the compiler failed") from error

    with pytest.raises(KeyboardInterrupt), interrupts.delivering():
        compile_something()


def test_an_exception_of_a_scripts_handler_is_raised_unchanged() -> None:
    raised = AlarmError("time is up")

    def handle(number: int, frame: object) -> None:
        raise raised

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(AlarmError) as caught, interrupts.delivering():
            try:
                signal.raise_signal(signal.SIGALRM)
            except BaseException:
                forever()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value is raised


def test_a_handler_that_raises_nothing_is_called_once_for_each_signal() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with interrupts.delivering():
            press()
            press()
    finally:
        signal.signal(signal.SIGINT, before)

    assert called == [signal.SIGINT] * 2


def test_after_the_block_nothing_is_raised_any_more() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.delivering():
        press()

    assert not eventually(lambda: False, 0.1)  # in which an interrupt would come


def test_without_signals_an_exception_passes_through_the_block() -> None:
    with pytest.raises(ZeroDivisionError), interrupts.delivering():
        raise ZeroDivisionError


def test_another_thread_may_compile_while_the_main_one_gets_a_signal() -> None:
    def compile_something() -> None:
        with interrupts.delivering():
            done.append(1)

    done: list[int] = []
    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join()

    assert done == [1]


def test_deferred_signals_are_delivered_as_soon_as_they_are_allowed() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        press()
        reached.append("noted")
        with interrupts.allowed():
            reached.append("never")

    assert reached == ["noted"]


def test_signals_are_deferred_again_after_they_were_allowed() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.allowed():
            pass
        press()
        reached.append("still noted")

    assert reached == ["still noted"]


ENDING = """
import poptorch
class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self):
        print("looked for garbage")
kept = Cycle()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end, collects_garbage", [("", True), ("raise KeyboardInterrupt", False)])
def test_a_process_that_ctrl_c_ends_does_not_collect_garbage(
    end: str, collects_garbage: bool
) -> None:
    done = programs.run("-c", ENDING.format(end=end))

    assert ("looked for garbage" in done.stdout) is collects_garbage


def failing(*_: object) -> None:
    raise ValueError("stopped")


class Failing:
    """Has handlers of signals."""

    def method(self, *_: object) -> None:
        failing()

    def __call__(self, *_: object) -> None:
        failing()


@pytest.mark.parametrize(
    "handler",
    [failing, Failing().method, Failing(), functools.partial(failing, 1)],
    ids=["a function", "a method", "an object", "a partial function"],
)
def test_an_exception_of_a_handler_is_recognized(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(ValueError, match="stopped") as raised:
            signal.raise_signal(signal.SIGUSR1)

        assert interrupts.is_from_handler(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_other_code_is_not_from_a_handler() -> None:
    with pytest.raises(ValueError, match="stopped") as raised:
        failing()

    assert not interrupts.is_from_handler(raised.value)
