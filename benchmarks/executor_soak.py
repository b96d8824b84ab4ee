"""Measure the memory that is left after 10,000 training calls, and after 200 wrapped models.

Each of the 200 cycles wraps, trains and destroys a model. The benchmark fails if resident memory
grows by more than 2 % between the 1,000th and the 10,000th call, or between the 20th and the 200th
cycle, or if more tensors are alive than before.

Usage: python benchmarks/executor_soak.py [--backend inductor]
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import poptorch

LIMIT = 1.02


class Net(nn.Module):
    """Five layers with ten tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, nn.functional.mse_loss(out, y)


def state() -> tuple[int, int]:
    """Return the resident bytes and the number of live tensors."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), tensors


def grown(what: str, first: int, last: int, step: Callable[[], None]) -> bool:
    """Repeat a step, print the growth between two repetitions, and return if it is too large."""
    for _ in range(first):
        step()
    before, tensors = state()
    for _ in range(last - first):
        step()
    after, more = state()
    sizes = f"{before / 2**20:.1f} MiB after {first:,}, {after / 2**20:.1f} MiB at the end"
    print(f"{last:,} {what}: {sizes} ({after / before - 1:+.2%}), {more - tensors:+d} tensors")
    return after > LIMIT * before or more > tensors


def main() -> None:
    """Run both tests. Exit with status 1 if memory grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--backend", default="reference", help="backend that runs the programs (default: reference)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(16, 32), torch.randn(16, 32)

    def options(accumulation: int = 1) -> poptorch.Options:
        made = poptorch.Options().backend(chosen.backend).showCompilationProgressBar(False)
        made.Training.gradientAccumulation(accumulation)
        return made

    def cycle() -> None:
        model = Net()
        training = poptorch.trainingModel(model, options(2))
        training(x, y)
        poptorch.inferenceModel(model, options())(x, y)
        training.destroy()

    model = Net()
    training = poptorch.trainingModel(
        model, options(2), poptorch.optim.Adam(model.parameters(), lr=0.001)
    )
    bad = grown("training calls", 1000, 10_000, lambda: training(x, y))
    bad |= grown("cycles of wrapping, training and destroying", 20, 200, cycle)
    sys.exit(bad)


if __name__ == "__main__":
    main()
