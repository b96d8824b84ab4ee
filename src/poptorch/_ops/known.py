"""The formulas of operators that public programs bring as compiled plug-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .identities import with_surrogate_gradient

_MANTISSA, _BIAS = 23, 127  # of float32


def autograd_proxy(value: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
    """Return the value; its gradient goes to the proxy only."""
    return with_surrogate_gradient(value, proxy, lambda gradient: gradient.to(proxy.dtype))


def distances(a: torch.Tensor, b: torch.Tensor, norm: float) -> torch.Tensor:
    """Return the norm of each ``a[i] - b[j]``, computed in float32: (M, K), (N, K) to (M, N)."""
    # Products of matrices would be quicker, and lose the digits of small distances.
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(a.float(), b.float(), norm, compute_mode=exact).to(a.dtype)


@dataclass(frozen=True)
class Format:
    """A floating-point format, as IEEE 754 has them: the largest exponent is not for numbers."""

    exponent_bits: int
    mantissa_bits: int
    stochastic: bool

    @property
    def bias(self) -> int:
        """What is added to exponents; the largest one itself."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(2**self.bias * (2 - 2**-self.mantissa_bits))

    def quantised(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of this format in the type that they came in; beyond it the largest."""
        wide = x.float().clamp(-self.largest, self.largest)
        exponent = (wide.view(torch.int32) >> _MANTISSA & 255) - _BIAS
        step = exponent.clamp(min=1 - self.bias) - self.mantissa_bits
        # A power of two by its bits: exact, as the division and the product then are.
        unit = (step + _BIAS << _MANTISSA).view(torch.float32)
        count = wide / unit
        whole = torch.floor(count + torch.rand_like(count)) if self.stochastic else count.round()
        return (whole * unit).to(x.dtype)


def simulated_quantisation(
    x: torch.Tensor, form: Format, in_forward: bool, backward: str
) -> torch.Tensor:
    """Quantise values, gradients, both or neither."""
    value = form.quantised(x.detach()) if in_forward else x
    if backward == "stop":
        return value.detach()
    return with_surrogate_gradient(
        value, x, form.quantised if backward == "quantise" else lambda gradient: gradient
    )


@dataclass(frozen=True)
class BlockSparse:
    """A constant matrix of which some square blocks are not zero."""

    shape: tuple[int, int]
    block: int
    rows: Sequence[int]
    cols: Sequence[int]
    values: Sequence[float]

    def times(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``matrix @ dense``: (..., columns, N) to (..., rows, N)."""
        blocks = torch.tensor(self.values, dtype=dense.dtype).view(-1, self.block, self.block)
        return self._product(blocks, self.rows, self.cols, self.shape[0], dense)

    def behind(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``dense @ matrix``: (..., N, rows) to (..., N, columns)."""
        blocks = torch.tensor(self.values, dtype=dense.dtype).view(-1, self.block, self.block)
        turned = dense.transpose(-1, -2)
        result = self._product(blocks.mT, self.cols, self.rows, self.shape[1], turned)
        return result.transpose(-1, -2)

    def _product(
        self,
        blocks: torch.Tensor,
        to: Sequence[int],
        source: Sequence[int],
        size: int,
        dense: torch.Tensor,
    ) -> torch.Tensor:
        """Every block times its part of the dense matrix, added up where it belongs."""
        read = torch.tensor(source, dtype=torch.int64)
        written = torch.tensor(to, dtype=torch.int64)
        *batch, length, width = dense.shape
        stacked = dense.reshape(*batch, length // self.block, self.block, width)
        parts = blocks @ stacked.index_select(-3, read)
        shape = (*batch, size // self.block, self.block, width)
        return torch.zeros(shape, dtype=dense.dtype).index_add(-3, written, parts).flatten(-3, -2)
