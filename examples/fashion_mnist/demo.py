"""Train the same network with plain PyTorch and with poptorch, and compare the results."""

import statistics
import time

import torch
from torch import nn

import native
import poptorch_ipu
from common import Result, dataset, parser, table

PROBE_STEPS = 20
PROBE_ROUNDS = 3
COMPARED_STEPS = 200
# in an epoch, at least, because compiling takes longer than an epoch of the small subset
IMAGES = 60_000


def native_seconds(threads: int, batch_size: int) -> float:
    """Return the time of a few native training steps with this number of threads."""
    torch.set_num_threads(threads)
    model = native.ClassificationModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    warm_up = PROBE_STEPS // 4
    for step in range(warm_up + PROBE_STEPS):
        if step == warm_up:
            started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.nll_loss(model(images), labels).backward()
        optimizer.step()
    return time.perf_counter() - started


def best_threads(batch_size: int) -> int:
    """Return the number of threads with which the native version is fastest. Both versions then use
    it.

    Threads wait for one another, so fewer threads are often faster if other programs use the cores.
    """
    candidates = sorted({1, torch.get_num_threads()})
    print(f"Trying {' and '.join(map(str, candidates))} thread(s)", flush=True)
    times: dict[int, list[float]] = {count: [] for count in candidates}
    for _ in range(PROBE_ROUNDS):
        for count in candidates:
            times[count].append(native_seconds(count, batch_size))
    return min(candidates, key=lambda count: statistics.median(times[count]))


def largest_difference(one: Result, other: Result) -> str:
    """Say by how much the losses of two versions differ in the first steps."""
    pairs = [*zip(one.losses, other.losses, strict=True)][:COMPARED_STEPS]
    if not pairs:
        return "No step was made, so there are no losses to compare"
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    return f"Losses of the first {len(pairs)} steps differ by at most {difference:.1e} (relative)"


def gain(native: Result, ours: Result) -> str:
    """Say how many times as fast the epochs are, measured alternately."""
    ratios = [b / a for a, b in zip(native.speeds, ours.speeds, strict=True) if a and b]
    if "reference" in ours.tier or not ratios:
        return f"Speeds are not compared: poptorch {ours.tier or 'made no step'}"
    return (
        f"{statistics.median(ratios):.2f} times as fast as {native.name}: median of {len(ratios)} "
        f"epochs that took turns, from {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main() -> None:
    """Run both versions with the same options, data, order and threads."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, help="default: what is fastest for the native one")
    args = options.parse_args()
    data = dataset(args)
    if args.limit is None and len(data.train) < IMAGES:
        args.passes = IMAGES // len(data.train)
        print(f"An epoch goes over them {args.passes} times")
    threads = args.threads or best_threads(args.batch_size)
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} thread(s): {args.epochs} epochs")

    print()
    turns = [version.epochs(args, data) for version in (native, poptorch_ipu)]
    results = [*zip(*turns, strict=True)][-1]

    print(f"\n--- side by side\n{data.notes[0]}")
    print(table(results))
    print(largest_difference(*results))
    print(gain(*results))


if __name__ == "__main__":
    main()
