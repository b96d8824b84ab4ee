"""Sliding windows over tensors whose innermost dimension they leave alone.

With the batch (or many channels) innermost every shift of a window moves by whole vectors:
gathering windows, adding them up again and comparing them need neither masks nor shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F

aten = torch.ops.aten
LEAST_INNERMOST = 8  # elements; fewer do not fill a vector


def stored(value: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the value as a row-major buffer of the given shape.

    The code generator computes most values where they are used, once per use; what a strided view
    looks at it must put in memory first.
    """
    value = value.contiguous()
    strides = torch.empty(shape, device="meta").stride()
    return torch.as_strided(value, shape, strides)


def batch_last(value: torch.Tensor) -> torch.Tensor:
    """(batch, channel, *space) to (channel, *space, batch)."""
    return value.permute(*range(1, value.dim()), 0)


def batch_first(value: torch.Tensor) -> torch.Tensor:
    """(channel, *space, batch) to (batch, channel, *space)."""
    return value.permute(-1, *range(value.dim() - 1))


@dataclass(frozen=True)
class Windows:
    """Windows of one size at regular steps over the padded space; one entry per dimension each."""

    space: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(
        space: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> Windows:
        """Make windows from ATen's arguments, where one number may stand for all dimensions."""

        def full(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) * (len(space) // len(values))

        return Windows(tuple(space), full(kernel), full(stride), full(padding), full(dilation))

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        """Positions within a window, row-major."""
        return product(*(range(k) for k in self.kernel))

    @property
    def count(self) -> tuple[int, ...]:
        """Number of windows per dimension."""
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                self.space, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def count_rounded_up(self) -> tuple[int, ...]:
        """Number of windows per dimension that begin inside the space and its left border."""
        reach = zip(self.space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(-(-(n + 2 * p - d * (k - 1) - 1) // s) + 1 for n, k, s, p, d in reach)

    def padded(self, value: torch.Tensor, fill: float) -> torch.Tensor:
        """(outer, *space, inner) with the border that windows may look at."""
        if not any(self.padding):
            return value
        border = [0, 0, *(p for padding in reversed(self.padding) for p in (padding, padding))]
        return F.pad(value, border, value=fill)

    def shifted(self, padded: torch.Tensor, tap: Sequence[int]) -> torch.Tensor:
        """For one tap: its element of every window, (outer, *count, inner)."""
        for dim, (t, c, s, d) in enumerate(
            zip(tap, self.count, self.stride, self.dilation, strict=True), 1
        ):
            padded = padded.narrow(dim, t * d, (c - 1) * s + 1)
            padded = aten.slice.Tensor(padded, dim, 0, padded.shape[dim], s)
        return padded

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        """(channel, *space, batch) to (channel * taps, windows * batch), zeros at the border."""
        if self.trivial:
            return stored(value, value.shape[0], value[0].numel())
        padded = self.padded(value, 0.0)
        padded = stored(padded, *padded.shape)
        steps = padded.stride()[1:-1]
        sizes = (*self.kernel, *self.count)
        strides = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        strides += [step * s for step, s in zip(steps, self.stride, strict=True)]
        shape = (padded.shape[0], *sizes, padded.shape[-1])
        view = torch.as_strided(padded, shape, (padded.stride(0), *strides, 1))
        rows = padded.shape[0] * torch.Size(self.kernel).numel()
        return stored(view.clone(), rows, view.numel() // rows)

    @property
    def trivial(self) -> bool:
        """Whether windows are single elements, each seen once."""
        return set(self.kernel) | set(self.stride) == {1} and not any(self.padding)

    def fold(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up what the windows say about each element: the reverse of ``shifted``.

        Args:
            contributions: one tensor (outer, *count, inner) per tap.

        Returns:
            (outer, *space, inner).
        """
        # Taps that differ by a multiple of the stride meet in the same phase of the space; within a
        # phase they are shifts of one another.
        phases: dict[tuple[int, ...], torch.Tensor] = {}
        size = tuple(
            -(-(n + 2 * p) // s)
            for n, p, s in zip(self.space, self.padding, self.stride, strict=True)
        )
        for tap, value in zip(self.taps, contributions, strict=True):
            at = [t * d for t, d in zip(tap, self.dilation, strict=True)]
            phase = tuple(a % s for a, s in zip(at, self.stride, strict=True))
            border = [0, 0]
            for a, s, c, n in reversed(list(zip(at, self.stride, self.count, size, strict=True))):
                border += [a // s, n - c - a // s]
            shifted = F.pad(value, border) if any(border) else value
            phases[phase] = phases[phase] + shifted if phase in phases else shifted
        return self._interleave(phases, contributions[0], size)

    def _interleave(
        self,
        phases: dict[tuple[int, ...], torch.Tensor],
        like: torch.Tensor,
        size: Sequence[int],
    ) -> torch.Tensor:
        shape = (like.shape[0], *size, like.shape[-1])
        parts = [
            phases[phase] if phase in phases else like.new_zeros(shape)
            for phase in product(*(range(s) for s in self.stride))
        ]
        # Innermost dimension first, so that the result is written in its final order.
        for dim, s in reversed(list(enumerate(self.stride, 2))):
            parts = [torch.stack(parts[i : i + s], dim) for i in range(0, len(parts), s)]
        (whole,) = parts
        full = [n * s for n, s in zip(size, self.stride, strict=True)]
        whole = whole.reshape(shape[0], *full, shape[-1])
        for dim, (n, p) in enumerate(zip(self.space, self.padding, strict=True), 1):
            whole = whole.narrow(dim, p, n)
        return whole
