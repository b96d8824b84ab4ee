"""Trains the same network with plain PyTorch and with poptorch; shows the figures together."""

import logging
import re
import statistics
import time

import torch
from torch import nn

import native
import poptorch_ipu
from common import Result, dataset, parser, table

PROBE_STEPS = 40
PROBE_ROUNDS = 5
COMPARED_STEPS = 200
IMAGES = 60_000  # of an epoch at least: compiling takes longer than the small subset


def native_seconds(threads: int, batch_size: int) -> float:
    """Return the time of a few native training steps on so many threads."""
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
    """Return the number of threads that suits the native version best; both then use it.

    Threads wait for one another, so where other programs use the cores fewer are often faster.
    """
    candidates = sorted({1, torch.get_num_threads()})
    times: dict[int, list[float]] = {count: [] for count in candidates}
    for _ in range(PROBE_ROUNDS):
        for count in candidates:
            times[count].append(native_seconds(count, batch_size))
    return min(candidates, key=lambda count: statistics.median(times[count]))


def largest_difference(one: Result, other: Result) -> str:
    """Say how far two versions' losses lie apart over the first steps."""
    pairs = [*zip(one.losses, other.losses, strict=True)][:COMPARED_STEPS]
    if not pairs:
        return "No step was made, so there are no losses to compare"
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    return f"Losses of the first {len(pairs)} steps: at most {difference:.1e} apart (relative)"


class TakeOver(logging.Handler):
    """Listens to poptorch for the call from which on its optimised program runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: list[tuple[float, str]] = []
        logger = logging.getLogger("poptorch:cpp")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message, with its time."""
        self._said.append((record.created, record.getMessage()))

    def first_call(self, result: Result) -> int | None:
        """Return the first call of the optimised program; None if it did not get that far."""
        # The model for testing is compiled later, and says so, too.
        said = [text for made, text in self._said if made <= result.trained_until]
        for text in said:
            if match := re.search(r"full speed from call (\d+) on", text):
                return int(match[1])
        compiles = any("calls run interpreted" in text for text in said)
        return None if compiles or "reference" in result.tier else 1  # code of an earlier run


def gain(native: Result, ours: Result) -> str:
    """Say how fast the epochs are in which nothing but the optimised program ran."""
    first = ours.optimised_from
    steps = len(ours.losses) // max(len(ours.speeds), 1)
    epochs = [at for at in range(len(ours.speeds)) if first and at * steps + 1 >= first]
    if not epochs:
        return "The optimised program made no whole epoch: take more, with --epochs"
    ratio = statistics.median(ours.speeds[at] / native.speeds[at] for at in epochs)
    return (
        f"Epochs of the optimised program alone, {epochs[0] + 1} to {epochs[-1] + 1}: "
        f"{ratio:.2f} times as fast as {native.name}"
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

    results, take_over = [], TakeOver()
    for version, title in ((native, "native PyTorch"), (poptorch_ipu, "poptorch")):
        print(f"\n--- {title}")
        results.append(version.run(args, data))

    results[1].optimised_from = take_over.first_call(results[1])

    print(f"\n--- side by side\n{data.notes[0]}")
    print(table(results))
    print(largest_difference(*results))
    print(gain(*results))


if __name__ == "__main__":
    main()
