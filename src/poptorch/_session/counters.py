"""Time stamps of the last call and the latencies between them (PopTorch user guide, "Features")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

KEYS = ("input", "input_complete", "output", "output_complete")
Stamps = dict[str, list[list[float]]]
Latency = tuple[float, float, float]


class LastCall(NamedTuple):
    """The last call: its batch is handed over at once, and all its results are taken at once."""

    moments: tuple[float, float, float, float]  # per key of KEYS, in seconds from any origin
    anchors: Mapping[str, torch.Tensor]  # by short name

    def counters(self, inputs: int, outputs: Sequence[int], times: int) -> Stamps:
        """Return PopTorch's form; ``outputs``: how many results a call returns of each tensor."""
        first, taken, ready, collected = self.moments
        return {
            "input": [[first] * times for _ in range(inputs)],
            "input_complete": [[taken] * times for _ in range(inputs)],
            "output": [[ready] * number for number in outputs],
            "output_complete": [[collected] * number for number in outputs],
        }


def latency(
    counters: Stamps, start: str, end: str, first: Callable[[Iterable[float]], float] = min
) -> Latency:
    """Return (min, max, mean) of the time from one event to a later one, as keys of ``counters``.

    Where there are more starts than ends, consecutive starts are replaced by their minimum.
    """
    starts = [first(stamps) for stamps in zip(*counters[start], strict=False)]
    ends = [max(stamps) for stamps in zip(*counters[end], strict=False)]
    if not starts or not ends:
        return 0.0, 0.0, 0.0
    factor = max(1, len(starts) // len(ends))
    grouped = [min(starts[i : i + factor]) for i in range(0, len(starts), factor)]
    times = [b - a for a, b in zip(grouped, ends, strict=False)]
    return min(times), max(times), sum(times) / len(times)
