"""How much memory tensors take while code runs, and models in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

_INFERENCE = """
import gc, sys
import poptorch, psutil, torch
from helpers.wrapping import options
def resident():
    gc.collect()
    return psutil.Process().memory_info().rss

class Layer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if rows > 1 else x @ self.weight

torch.set_num_threads(1)
rows = int(sys.argv[2])
for _ in range(2):  # the first time imports and compiles
    before, layers = resident(), [Layer(1024, 1024) for _ in range(6)]
    wrapper = poptorch.inferenceModel(torch.nn.Sequential(*layers), options(sys.argv[1]))
    wrapper(torch.ones(rows, 1024))
    print((resident() - before) / sum(each.weight.nbytes for each in layers))
    wrapper.destroy()
    del layers, wrapper
"""


def weights_of_inference(backend: str, rows: int) -> float:
    """How often a process has the weights of a model that has answered, the model's included."""
    # What the process frees it gives back.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "POPTORCH_KEEP_FREED_MEMORY": "0"}
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _INFERENCE, backend, str(rows)]
    return float(subprocess.check_output(command, env=environment, text=True).split()[1])


def peak_of_call(executor: Callable[..., Any], *args: torch.Tensor) -> int:
    """The most bytes that torch's allocator held at once for one call of a compiled executor."""
    executor(*args)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        executor(*args)
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
