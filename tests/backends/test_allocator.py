"""Steps find the memory in place that the step before has freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from poptorch.backends import allocator

FREE_AFTER_USE = """
import ctypes, sys, torch
import poptorch
from poptorch.backends.allocator import keep_freed_memory

class Info(ctypes.Structure):  # of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
if sys.argv[1] == "kept":
    assert keep_freed_memory()
if "program" in sys.argv[1]:
    options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
    model(torch.ones(1, 1))
if sys.argv[1] == "a compiled program":
    plan = model.plan()
    functions = dict.fromkeys(plan.program.graphs)
    poptorch.backends.available()["inductor"].assemble(plan, functions, 0.0)
before = mallinfo().fordblks
values = [torch.empty(5 << 20) for _ in range(3)]
del values
print(mallinfo().fordblks - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")
@pytest.mark.parametrize(
    ("mode", "wanted", "kept"),
    [
        ("as it is", "", 0),
        ("kept", "", 3),
        ("a compiled program", "", 3),
        ("a compiled program", "0", 0),
        ("a program of the reference backend", "", 0),
    ],
)
def test_freed_memory_stays(mode: str, wanted: str, kept: int) -> None:
    """Asked of the allocator: not every kernel counts page faults."""
    command = [sys.executable, "-c", FREE_AFTER_USE, mode]
    environment = os.environ | {"POPTORCH_KEEP_FREED_MEMORY": wanted}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert round(int(done.stdout) / (20 << 20)) == kept


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator._set_thresholds.__wrapped__() is False
