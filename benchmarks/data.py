"""Compare the data loader with torch's, and its asynchronous mode with its synchronous mode.

The benchmark measures whole epochs of the same combined batches with both loaders, a training loop
in which loading takes as long as computing, the first batch of a new loader with many workers, the
training loop of the tutorial and its waiting time, and the cost of handing over one element. It
also repeats cycles of creating, using and deleting a loader, after which nothing may be left.

Usage: python benchmarks/data.py [--quick] [--cycles N] [--first] [--tutorial]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

import poptorch
from harness import alternate, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist"))
from data import load  # the module of the example, from the folder that was just added
from poptorch_ipu import ClassificationModel, ModelWithLoss

MICRO, ITERATIONS, ACCUMULATION = 16, 4, 4
COMBINED = MICRO * ITERATIONS * ACCUMULATION


class Images(Dataset[Any]):
    """Images that are normalised when they are read, as in vision scripts."""

    def __init__(self, size: int) -> None:
        self.images = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.images[index].float()[None] / 255 - 0.5) / 0.5, self.labels[index]


class Waiting(Dataset[torch.Tensor]):
    """Takes a millisecond for each sample, like a read from a disk."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((28, 28), float(index))


def options(iterations: int = ITERATIONS, accumulation: int = ACCUMULATION) -> poptorch.Options:
    """Return options with several micro-batches per call."""
    made = poptorch.Options().deviceIterations(iterations)
    made.Training.gradientAccumulation(accumulation)
    return made


def epoch(loader: Iterable[Any]) -> Callable[[], int]:
    """Return a function that iterates once over a loader."""
    return lambda: sum(1 for _ in loader)


def against_torch(title: str, data: Dataset[Any], rounds: int, **kwargs: Any) -> None:
    """Print the time of whole epochs with both loaders."""
    persistent = {"persistent_workers": True} if kwargs.get("num_workers") else {}
    theirs = torch.utils.data.DataLoader(data, COMBINED, drop_last=True, **kwargs, **persistent)
    ours = poptorch.DataLoader(options(), data, MICRO, **kwargs)
    assert len(theirs) == len(ours)
    times = alternate({"torch": epoch(theirs), "poptorch": epoch(ours)}, rounds, warmup=1)
    print(table(f"{title}: an epoch of {len(ours)} x {COMBINED} samples", times, "torch"))
    pairs = zip(times["torch"], times["poptorch"], strict=True)
    print(
        f"  median of the ratios round by round: {statistics.median(a / b for a, b in pairs):.2f}"
    )


def busy(seconds: float) -> None:
    """Keep a core busy for some time, like a model's computation."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def overlap(rounds: int, batches: int) -> None:
    """Print the time of loops in which loading takes as long as computing."""
    size, data = 16, Waiting(16 * batches)
    sync = poptorch.DataLoader(options(1, 1), data, size)
    async_ = poptorch.DataLoader(
        options(1, 1), data, size, mode=poptorch.DataLoaderMode.Async,
        async_options={"load_indefinitely": False},
    )  # fmt: skip
    begin = time.perf_counter()
    epoch(sync)()
    load = (time.perf_counter() - begin) / batches

    def train(loader: Iterable[Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                busy(load)

        return run

    contestants = {
        "loading alone": epoch(sync),
        "compute alone": lambda: busy(load * batches),
        "Sync": train(sync),
        "Async": train(async_),
    }
    times = alternate(contestants, rounds, warmup=1)
    print(table(f"loading = compute, {batches} batches of {size} x 1 ms", times, "Sync"))
    longer = [max(a, b) for a, b in zip(*(times[k] for k in list(contestants)[:2]), strict=True)]
    ratio = statistics.median(a / b for a, b in zip(times["Async"], longer, strict=True))
    print(f"  Async / the longer of the two: {ratio:.3f}")


def tutorial(rounds: int, batches: int) -> None:
    """Print how long the training loop of the tutorial waits for its images."""
    data = load(limit=16 * batches)
    print("\n".join(data.notes))
    for mode in (poptorch.DataLoaderMode.Sync, poptorch.DataLoaderMode.Async):
        opts = options(1, 1).showCompilationProgressBar(False)
        loader = poptorch.DataLoader(opts, data.train, 16, shuffle=True, mode=mode)
        net = ModelWithLoss(ClassificationModel(), torch.nn.NLLLoss())
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
        training = poptorch.trainingModel(net, opts, optimizer)
        training(*next(iter(loader)))
        shares = []
        for _ in range(rounds):
            begin, waited, iterator = time.perf_counter(), 0.0, iter(loader)
            for _ in range(batches):
                asked = time.perf_counter()
                batch = next(iterator)
                waited += time.perf_counter() - asked
                training(*batch)
            shares.append(waited / (time.perf_counter() - begin))
        share = statistics.median(shares)
        print(f"tutorial, {mode.name}: {share:.1%} of the time goes into waiting for data")


def first_batch(rounds: int, data: Dataset[Any], workers: int) -> None:
    """Print the time from creating a loader with many workers to its first batch."""

    def theirs() -> None:
        next(iter(torch.utils.data.DataLoader(data, COMBINED, num_workers=workers)))

    def ours(mode: poptorch.DataLoaderMode) -> Callable[[], None]:
        def run() -> None:
            loader = poptorch.DataLoader(options(), data, MICRO, num_workers=workers, mode=mode)
            next(iter(loader))
            loader.terminate()

        return run

    sync, asynchronous = ours(poptorch.DataLoaderMode.Sync), ours(poptorch.DataLoaderMode.Async)
    begin = time.perf_counter()
    asynchronous()
    first = time.perf_counter() - begin  # Python's fork server imports torch, once in a program
    contestants = {"torch": theirs, "Sync": sync, "Async": asynchronous}
    times = alternate(contestants, rounds, warmup=0)
    print(table(f"first batch of a new loader with {workers} workers", times, "torch"))
    print(f"  the first asynchronous loader of a program: {first:.2f} s")


def handover(rounds: int, shape: tuple[int, ...]) -> None:
    """Print the cost of taking one element that is already loaded."""
    loader = poptorch.AsynchronousDataAccessor([torch.ones(shape)] * 200, buffer_size=220)
    seconds = []
    for _ in range(rounds):
        iter(loader)
        time.sleep(0.3)  # the ring fills
        begin = time.perf_counter()
        count = sum(1 for _ in loader)
        seconds.append((time.perf_counter() - begin) / count)
    size = torch.ones(shape).nbytes / 1e6
    print(f"taking an element of {size:.2f} MB that is ready: {min(seconds) * 1e6:.1f} us")


def cycles(count: int) -> None:
    """Create, use and delete loaders. Print what is left."""
    data = TensorDataset(torch.arange(32.0))

    def one(number: int) -> None:
        loader = poptorch.DataLoader(
            options(1, 1), data, 4, mode=poptorch.DataLoaderMode.Async,
            num_workers=number % 50 == 0, async_options={"early_preload": number % 2 == 0},
        )  # fmt: skip
        for _ in zip(loader, range(number % 10), strict=False):
            pass

    one(1)  # Python's fork server and resource tracker stay as long as the program
    before = left()
    begin = time.perf_counter()
    for number in range(count):
        one(number)
    seconds = time.perf_counter() - begin
    after = left()
    print(f"{count} cycles in {seconds:.1f} s; processes, descriptors, segments, ring mappings:")
    print(f"  before {before}, after {after}")
    if after != before:
        raise SystemExit("something was left behind")


def left() -> tuple[int, int, int, int]:
    """Count the resources that this process could leave behind."""
    mine, below, generation = 0, {os.getpid()}, {os.getpid()}
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue  # it has just ended
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        below |= generation
        mine += len(generation)
    segments = [
        n for n in os.listdir("/dev/shm") if below & {int(p) for p in n.split("_") if p.isdigit()}
    ]
    maps = Path("/proc/self/maps").read_text().count("memfd:poptorch")
    return mine, len(os.listdir("/proc/self/fd")), len(segments), maps


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, for a first look")
    parser.add_argument("--cycles", type=int, default=None, help="only this many cycles")
    parser.add_argument("--first", action="store_true", help="only the first batch")
    parser.add_argument("--tutorial", action="store_true", help="only the tutorial's loop")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cycles is not None:
        cycles(args.cycles)
        return
    if args.tutorial:
        tutorial(5, 3750)
        return
    if args.first:
        first_batch(5, Images(COMBINED * 8), 8)
        return
    rounds = 3 if args.quick else 15
    size = COMBINED * (8 if args.quick else 40)
    images = Images(size)
    tensors = TensorDataset(torch.rand(size, 1, 28, 28), torch.randint(0, 10, (size,)))
    for shuffle in (False, True):
        order = "shuffled" if shuffle else "in order"
        against_torch(f"tensors, {order}", tensors, rounds, shuffle=shuffle)
        against_torch(f"images, {order}", images, rounds, shuffle=shuffle)
    against_torch("images, 1 worker", images, rounds, num_workers=1)
    first_batch(rounds, images, 8)
    overlap(rounds, 10 if args.quick else 40)
    tutorial(min(rounds, 5), 100 if args.quick else 3750)
    handover(rounds, (COMBINED, 1, 28, 28))
    handover(rounds, (1,))
    cycles(50 if args.quick else 200)


if __name__ == "__main__":
    main()
