"""Steps find the memory in place that the step before has freed."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from poptorch.backends import process

# Each case in a process of its own, whose memory nothing has touched but imports.
FREE_AFTER_USE = """
import ctypes, json, os, sys, torch
import poptorch
from poptorch.backends.process import keep_freed_memory

class Info(ctypes.Structure):  # of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def free_after_use(mode):
    if mode == "kept":
        assert keep_freed_memory()
    if "program" in mode:
        options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
        model = poptorch.inferenceModel(torch.nn.Linear(1, 1), options)
        model(torch.ones(1, 1))
    if mode == "a compiled program":
        plan = model.plan()
        functions = dict.fromkeys(plan.program.graphs)
        poptorch.backends.available()["inductor"].assemble(plan, functions, 0.0)
    before = mallinfo().fordblks
    values = [torch.empty(5 << 20) for _ in range(3)]
    del values
    print(mallinfo().fordblks - before, flush=True)

for mode, wanted in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        os.environ["POPTORCH_KEEP_FREED_MEMORY"] = wanted
        free_after_use(mode)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
CASES = {
    ("as it is", ""): 0,
    ("kept", ""): 3,
    ("a compiled program", ""): 3,
    ("a compiled program", "0"): 0,
    ("a program of the reference backend", ""): 0,
}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")
def test_freed_memory_stays() -> None:
    """Asked of the allocator: not every kernel counts page faults."""
    command = [sys.executable, "-c", FREE_AFTER_USE, json.dumps(list(CASES))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kept = [round(int(freed) / (20 << 20)) for freed in done.stdout.split()]
    assert dict(zip(CASES, kept, strict=True)) == CASES


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    assert process._set_thresholds.__wrapped__() is False
