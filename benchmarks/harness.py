"""Time contestants alternately in one process, so that a noisy machine affects all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 5
) -> dict[str, list[float]]:
    """Run every contestant once per round, in a random order.

    The previous contestant leaves the caches more or less full, and threads awake or asleep. With a
    random order, every contestant follows every other one.

    Returns:
        Seconds of every round, by contestant.
    """
    for run in contestants.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, draw = list(contestants.items()), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name, run in order:
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median seconds of each contestant."""
    return {name: statistics.median(values) for name, values in times.items()}


def table(title: str, times: Mapping[str, list[float]], against: str) -> str:
    """Return medians in milliseconds, rates and ratios (time of ``against`` / own time)."""
    middle = medians(times)
    lines = [title]
    for name, seconds in middle.items():
        ratio = middle[against] / seconds
        lines.append(
            f"  {name:<22} {seconds * 1e3:8.3f} ms {1 / seconds:9.1f} it/s"
            f"   {ratio:5.2f} x {against}"
        )
    return "\n".join(lines)
