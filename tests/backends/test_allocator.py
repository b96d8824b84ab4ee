"""Steps find the memory in place that the step before has freed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from poptorch.backends import allocator

STEPS = """
import resource, sys, torch
from poptorch.backends.allocator import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        values = [torch.empty(250_000).fill_(1.0) for _ in range(8)]
        del values
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
before = faults()
assert keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system's allocator is not glibc's"
)
def test_freed_pages_stay() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before > 1000  # 8 MB of pages, 20 times
    assert after < 100


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory.__wrapped__() is False
