"""How much memory tensors take while code runs, and models in a process of their own."""

import gc
import os
import subprocess
import sys

import psutil
import torch
from torch import nn

import poptorch
from helpers.wrapping import options


def weights_of_inference(backend: str) -> float:
    """How often a process has the weights of a model that has answered, the model's included."""
    # What the process frees it gives back.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "POPTORCH_KEEP_FREED_MEMORY": "0"}
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "helpers.memory", backend]
    child = subprocess.run(command, env={**os.environ, **own, "PYTHONPATH": paths},
                           check=True, capture_output=True, text=True)  # fmt: skip
    return float(child.stdout)


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _taken(backend: str) -> float:
    before, model = _resident(), nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    wrapper = poptorch.inferenceModel(model, options(backend))
    wrapper(torch.ones(8, 1024))
    taken = _resident() - before
    wrapper.destroy()
    return taken / sum(weight.nbytes for weight in model.parameters())


def peak_of_call(executor, *args: torch.Tensor) -> int:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    _taken(sys.argv[1])  # imports and compiles
    print(_taken(sys.argv[1]))
