"""Compute sliding windows with the batch or many channels innermost.

Every shift of a window then moves by whole vectors, without masks or shuffles.
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
    """Return the value as a row-major buffer. Most values are computed again at each use."""
    value = value.contiguous()
    strides = torch.empty(shape, device="meta").stride()
    return torch.as_strided(value, shape, strides)


def batch_last(value: torch.Tensor) -> torch.Tensor:
    """Permute (batch, channel, *space) to (channel, *space, batch)."""
    return value.permute(*range(1, value.dim()), 0)


def batch_first(value: torch.Tensor) -> torch.Tensor:
    """Permute (channel, *space, batch) to (batch, channel, *space)."""
    return value.permute(-1, *range(value.dim() - 1))


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """Permute (batch, channel, *space) to (batch, *space, channel)."""
    return value.movedim(1, -1)


def channels_first(value: torch.Tensor) -> torch.Tensor:
    """Permute (batch, *space, channel) to (batch, channel, *space)."""
    return value.movedim(-1, 1)


@dataclass(frozen=True)
class Windows:
    """Windows of one size at regular steps over the padded space. Each field has one entry per
    dimension.
    """

    space: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(space: Sequence[int], *geometry: Sequence[int]) -> Windows:
        full = [tuple(values) * (len(space) // len(values)) for values in geometry]
        return Windows(tuple(space), *full)

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        return product(*(range(k) for k in self.kernel))

    @property
    def count(self) -> tuple[int, ...]:
        return tuple(n // s + 1 for n, s in zip(self.reach, self.stride, strict=True))

    @property
    def reach(self) -> list[int]:
        sizes = zip(self.space, self.kernel, self.padding, self.dilation, strict=True)
        return [n + 2 * p - d * (k - 1) - 1 for n, k, p, d in sizes]

    def padded(self, value: torch.Tensor, fill: float) -> torch.Tensor:
        """Return (outer, *space, inner) with the border that windows may read."""
        if not any(self.padding):
            return value
        border = [0, 0, *(p for padding in reversed(self.padding) for p in (padding, padding))]
        return F.pad(value, border, value=fill)

    def shifted(self, padded: torch.Tensor, tap: Sequence[int]) -> torch.Tensor:
        """Return, for one tap, its element of every window: (outer, *count, inner)."""
        for dim, (t, c, s, d) in enumerate(
            zip(tap, self.count, self.stride, self.dilation, strict=True), 1
        ):
            padded = padded.narrow(dim, t * d, (c - 1) * s + 1)
            padded = aten.slice.Tensor(padded, dim, 0, padded.shape[dim], s)
        return padded

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        """Convert (channel, *space, batch) to (channel * taps, windows * batch), with zeros at the
        border.
        """
        view = self._seen(value)
        rows = value.shape[0] * torch.Size(self.kernel).numel()
        return stored(view.clone(), rows, view.numel() // rows)

    @property
    def are_elements(self) -> bool:
        """Return whether each window is one element, and each element one window."""
        return max(*self.kernel, *self.stride) == 1 and not any(self.padding)

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Convert (batch, *space, channel) to (batch * windows, taps * channel), with zeros at the
        border.
        """
        if self.are_elements:
            return value.reshape(-1, value.shape[-1])
        view, dims = self._seen(value), len(self.space)
        view = view.permute(0, *range(dims + 1, 2 * dims + 1), *range(1, dims + 1), -1)
        columns = value.shape[-1] * torch.Size(self.kernel).numel()
        gathered = view.clone(memory_format=torch.contiguous_format)
        return stored(gathered, view.numel() // columns, columns)

    def _seen(self, value: torch.Tensor) -> torch.Tensor:
        """Convert (outer, *space, inner) to (outer, *kernel, *count, inner)."""
        padded = self.padded(value, 0.0)
        padded = stored(padded, *padded.shape)
        steps = padded.stride()[1:-1]
        strides = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        strides += [step * s for step, s in zip(steps, self.stride, strict=True)]
        shape = (padded.shape[0], *self.kernel, *self.count, padded.shape[-1])
        return torch.as_strided(padded, shape, (padded.stride(0), *strides, 1))

    def fold(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum the contributions of windows to each element, given a tensor per tap: the reverse of
        ``shifted``.
        """
        # Taps that differ by a multiple of the stride belong to the same phase of the space. Within
        # a phase they are shifts of one another.
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
        self, phases: dict[tuple[int, ...], torch.Tensor], like: torch.Tensor, size: Sequence[int]
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
