"""Share code between both versions of the example: options, progress and results."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from data import DataError, FashionMNIST, load

# With this seed, losses can be compared step by step. With about half of all seeds they cannot: in
# some early step, an activation is so close to zero that rounding decides on which side of a ReLU
# it is. The native loop in float64 then differs from the one in float32 in the same way.
SEED = 10
TEST_BATCH = 100  # divides the 10,000 test images, and the 1,000 of the small subset


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options, the same for every version."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=16)
    options.add_argument("--lr", type=float, default=0.001)
    options.add_argument("--momentum", type=float, default=0.9)
    options.add_argument(
        "--seed", type=int, default=SEED, help="for the weights and the data order (default: 10)"
    )
    options.add_argument(
        "--data-dir",
        default=os.environ.get("FASHION_MNIST_DIR"),
        help="directory with the four files of FashionMNIST (default: $FASHION_MNIST_DIR)",
    )
    options.add_argument("--limit", type=int, help="train on only this number of images")
    options.add_argument(
        "--passes", type=int, default=1, help="how many times an epoch uses each image (default: 1)"
    )
    return options


def dataset(args: argparse.Namespace) -> FashionMNIST:
    """Load the data for the options, and print which data it is. Exit if a file is damaged."""
    try:
        found = load(args.data_dir, args.limit)
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    for note in found.notes:
        print(note)
    return found


@dataclass
class Result:
    """The results of one version of the example.

    Attributes:
        name: the name of the version.
        speeds: iterations per second of each epoch.
        epoch_losses: mean loss of each epoch.
        losses: the loss of every step, in order.
        compile_seconds: time spent compiling; None if nothing is compiled.
        accuracy: share of the test images that were classified correctly, 0 to 1.
        tier: what ran the steps in the end, in poptorch's words.
    """

    name: str
    speeds: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    accuracy: float = 0.0
    tier: str = ""

    def epoch(self, loader: Collection[Any], passes: int = 1) -> Iterator[Any]:
        """Yield the batches of one epoch, then record and print its speed and loss."""
        number = len(self.speeds) + 1
        first = len(self.losses)
        batches = itertools.chain.from_iterable(itertools.repeat(loader, passes))
        title, total = f"{self.name:<15} [Epoch {number:02d}]", passes * len(loader)
        bar = tqdm(batches, desc=title, total=total, leave=False, disable=None)
        started = time.perf_counter()
        yield from bar
        seconds = time.perf_counter() - started
        losses = self.losses[first:]
        self.speeds.append(len(losses) / seconds)
        self.epoch_losses.append(sum(losses) / max(len(losses), 1))
        print(
            f"{title} {self.speeds[-1]:8.1f} it/s, {seconds:6.1f} s, "
            f"mean loss {self.epoch_losses[-1]:.4f}, last loss {losses[-1]:.4f}"
            if losses
            else f"{title} no full batch: lower --batch-size or raise --limit",
            flush=True,
        )

    def step(self, loss: torch.Tensor) -> None:
        """Record the loss of one step."""
        self.losses.append(loss.item())

    def finish(self, correct: int, total: int, compile_seconds: float | None = None) -> Result:
        """Record and print the accuracy, and the compile time if there is one."""
        self.accuracy = correct / total
        self.compile_seconds = compile_seconds
        if compile_seconds is not None:
            print(f"{self.name:<15} Compile time: {compile_seconds:.2f} s")
        print(f"{self.name:<15} Test accuracy: {self.accuracy:.2%} of {total} images", flush=True)
        return self


def finished(epochs: Iterator[Result]) -> Result:
    """Train to the end and return the result."""
    *_, result = epochs
    return result


def table(results: Sequence[Result]) -> str:
    """Return a table of the results of several versions."""

    def seconds(result: Result) -> str:
        return "none" if result.compile_seconds is None else f"{result.compile_seconds:.2f} s"

    rows = [("", *(result.name for result in results))]
    rows.append(("compile time", *map(seconds, results)))
    for epoch, _ in enumerate(results[0].speeds):
        cells = (f"{r.speeds[epoch]:.1f} it/s  loss {r.epoch_losses[epoch]:.4f}" for r in results)
        rows.append((f"epoch {epoch + 1}", *cells))
    rows.append(("test accuracy", *(f"{result.accuracy:.2%}" for result in results)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)
