"""How many threads a call runs on, with a clock that says what each number costs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from poptorch.backends.process import REST, Threads


class Machine:
    """Lets time pass as the number of threads in force would."""

    def __init__(self, one: float, two: float) -> None:
        self.now, self.one, self.two = 0.0, one, two
        self.threads = Threads(lambda: self.now)

    def call(self) -> int:
        with self.threads:
            number = torch.get_num_threads()
            self.now += self.one if number == 1 else self.two
        return number


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_the_faster_number_is_kept_and_the_setting_restored() -> None:
    small, large = Machine(one=1.0, two=1.1), Machine(one=1.9, two=1.0)
    assert [small.call() for _ in range(9)] == [2, 2, 1, 2, 1, 2, 1, 1, 1]
    assert [large.call() for _ in range(6)] == [2, 2, 1, 2, 2, 2]  # settled by the first pair
    assert torch.get_num_threads() == 2


def test_a_busy_neighbour_is_noticed_and_so_is_its_end() -> None:
    machine = Machine(one=1.9, two=1.0)
    for _ in range(5):
        machine.call()
    machine.two = 40.0
    calls = [machine.call() for _ in range(6)]
    assert calls == [2, 2, 2, 1, 1, 1]  # two slow ones, a trial, then one thread
    machine.two = 1.0
    numbers = [machine.call() for _ in range(int(REST * 42 / 1.9) + 5)]
    assert numbers[-1] == 2
    assert numbers.index(2) * 1.9 >= REST * 41  # trials are rare


def test_the_users_number_starts_it_again_and_determinism_stops_it() -> None:
    machine = Machine(one=1.0, two=2.0)
    for _ in range(5):
        machine.call()
    assert machine.threads.chosen == 1
    torch.set_num_threads(3)
    assert machine.call() == 3
    torch.use_deterministic_algorithms(True)
    try:
        assert {machine.call() for _ in range(20)} == {3}
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ZeroDivisionError), machine.threads:
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert machine.call() == 1


def test_a_number_that_another_thread_sets_is_kept() -> None:
    """Torch lets a thread begin with the process's number where it first looks at it."""
    numbers: list[int] = []
    limited, chosen = threading.Event(), threading.Event()

    def other() -> None:
        torch.set_num_threads(2)
        chosen.set()
        limited.wait(60)
        numbers.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    machine = Machine(one=1.0, two=2.0)
    machine.call()
    thread.start()
    chosen.wait(60)
    machine.call()
    with machine.threads:
        assert torch.get_num_threads() == 1
        limited.set()
        thread.join(60)
    assert numbers == [2]


@pytest.mark.slow
def test_one_thread_holds_for_regions_that_ask_for_more(tmp_path) -> None:
    """Compiled code writes its number of threads into its parallel regions."""
    source = tmp_path / "region.c"
    source.write_text(
        "#include <omp.h>\nint threads(void) { int n = 0;\n"
        "#pragma omp parallel num_threads(2)\n{ if (omp_get_thread_num() == 0) "
        "n = omp_get_num_threads(); } return n; }\n"
    )
    library = tmp_path / "region.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-fopenmp", source, "-o", library], check=True)
    check = f"""
import ctypes, torch
from poptorch.backends.process import Threads
torch.set_num_threads(2)
region = ctypes.CDLL({str(library)!r}).threads
times = iter([0, 1, 1, 3, 3, 4])
threads = Threads(lambda: next(times))
with threads: pass
with threads: assert region() == 2
with threads: assert region() == 1
assert region() == 2
"""
    subprocess.run([sys.executable, "-c", check], check=True)
