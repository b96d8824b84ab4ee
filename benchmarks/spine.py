"""The tutorial's training step: poptorch's backends against the eager loop a user would write.

Prints iterations per second with their ratios to eager, and the time from wrapping a model to its
first result. Usage: python benchmarks/spine.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import poptorch
from harness import alternate, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist"))
from poptorch_ipu import ClassificationModel, ModelWithLoss

MICRO_BATCH = 16


def model() -> torch.nn.Module:
    """The tutorial's network with its loss, the same weights every time."""
    torch.manual_seed(0)
    return ModelWithLoss(ClassificationModel(), torch.nn.NLLLoss())


def eager(x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """The native loop's step, with the fastest stock optimizer."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        _, loss = net(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def wrapped(backend: str, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[[], object], float]:
    """A wrapped model's step, and the seconds from wrapping to the first result."""
    net = copy.deepcopy(model())
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    start = time.perf_counter()
    training = poptorch.trainingModel(net, options, optimizer)
    training(x, y)
    return lambda: training(x, y), time.perf_counter() - start


def main() -> None:
    """Run the comparison."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = arguments.parse_args()
    x, y = torch.randn(MICRO_BATCH, 1, 28, 28), torch.randint(0, 10, (MICRO_BATCH,))
    print(f"{platform.machine()}, torch {torch.__version__}, micro-batch {MICRO_BATCH}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        contestants = {"eager": eager(x, y)}
        for backend in ("reference", "inductor"):
            contestants[backend], first = wrapped(backend, x, y)
            print(f"first result with {backend}: {first:.2f} s after wrapping")
        times = alternate(contestants, rounds=200 if options.quick else 1000)
        print(table(f"one training step, {threads} thread(s)", times, against="eager"))


if __name__ == "__main__":
    main()
