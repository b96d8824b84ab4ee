"""Compute maximum pooling by comparisons, over whole vectors of the batch or of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernels import when
from .lowering import memory_order
from .windows import (
    LEAST_INNERMOST,
    Windows,
    batch_first,
    batch_last,
    channels_first,
    channels_last,
)


@dataclass(frozen=True)
class _Pool:
    """One maximum pooling, by comparisons.

    With ATen's branch per element, which random data mispredicts, a step of the tutorial's CNN
    takes 1.73 times as long; 2.00 times with 8 micro-batches of 16.
    """

    windows: Windows
    channels_last: bool
    is_cut_off: bool  # the last windows reach over the end

    @staticmethod
    def of(
        x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
        ceil_mode: bool = False,
    ) -> _Pool:  # fmt: skip
        windows = Windows.of(x.shape[2:], kernel, stride or kernel, padding, dilation)
        ends = zip(windows.reach, windows.stride, strict=True)
        is_cut_off = ceil_mode and any(n % s for n, s in ends)
        return _Pool(windows, memory_order(x) == (0, 2, 3, 1), is_cut_off)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Permute (batch, channel, *space) to (outermost, *space, innermost)."""
        return channels_last(x) if self.channels_last else batch_last(x)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        return channels_first(y) if self.channels_last else batch_first(y)

    def taps(self, x: torch.Tensor) -> list[torch.Tensor]:
        padded = self.windows.padded(self.enter(x), float("-inf"))
        return [self.windows.shifted(padded, tap) for tap in self.windows.taps]


def _winner(taps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of the tap that ATen's loop would choose: the first maximum, or
    the last NaN.
    """
    best, winner = taps[0], torch.zeros_like(taps[0], dtype=torch.int32)
    for number, value in enumerate(taps[1:], 1):
        better = (value > best) | (value != value)
        best = torch.where(better, value, best)
        winner = torch.where(better, number, winner)
    return winner


def _fills_vectors(x: torch.Tensor, *geometry: Any) -> bool:
    """Return whether the batch or the channels fill vectors, and no window reaches over the end."""
    if x.dim() != 4 or not x.is_floating_point():
        return False
    pool = _Pool.of(x, *geometry)
    if x.shape[1 if pool.channels_last else 0] < LEAST_INNERMOST:
        return False
    return not pool.is_cut_off


@when(_fills_vectors)
def max_pool(x: torch.Tensor, *geometry: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pool = _Pool.of(x, *geometry)
    taps = pool.taps(x)
    best = taps[0]
    for value in taps[1:]:
        best = torch.maximum(best, value)
    return pool.leave(best), pool.leave(_positions(pool.windows, _winner(taps)))


def _positions(windows: Windows, winner: torch.Tensor) -> torch.Tensor:
    """Convert tap numbers to row-major positions in the unpadded space."""
    winner = winner.long()
    position = torch.zeros_like(winner)
    for dim, (n, c, s, p) in enumerate(
        zip(windows.space, windows.count, windows.stride, windows.padding, strict=True)
    ):
        inner = torch.Size(windows.kernel[dim + 1 :]).numel()
        tap = winner // inner % windows.kernel[dim]
        start = torch.arange(c, device=winner.device).view(-1, *(1,) * (len(windows.space) - dim))
        position = position * n + start * s - p + tap * windows.dilation[dim]
    return position


@when(lambda grad, x, *rest: _fills_vectors(x, *rest[:-1]))
def max_pool_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Find the maximum again. This takes a few vector instructions, whereas storing it costs memory
    traffic.
    """
    *geometry, _indices = rest
    pool = _Pool.of(x, *geometry)
    taps = pool.taps(x)
    winner, share = _winner(taps), pool.enter(grad)
    shares = [torch.where(winner == number, share, 0.0) for number in range(len(taps))]
    return pool.leave(pool.windows.fold(shares))
