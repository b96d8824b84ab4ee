"""Storing what an update computed in the type that it is kept in, rounded at random if asked for.

Source: PopTorch user guide, "Half / float 16 support". The random bits are a hash of a
counter and of the element's place: every backend, and every replica and
process with the same counter, draws the same ones.
"""

from __future__ import annotations

import torch

from .._ops.rounding import DROPPED_BITS, rounded

_WORD = 2**32 - 1


class Stores:
    """Brings computed values into the types that they are stored in, during one update.

    Args:
        counter: value of ``rng.rounding``; None to round to nearest.
    """

    def __init__(self, counter: torch.Tensor | None) -> None:
        self._counter = counter
        self._drawn = 0

    def __call__(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the value in the given type."""
        if self._counter is None or value.dtype != torch.float32 or dtype not in DROPPED_BITS:
            return value.to(dtype)
        bits = self._random(value.numel(), DROPPED_BITS[dtype]).view(value.shape)
        return rounded(value, dtype, bits)

    def _random(self, count: int, width: int) -> torch.Tensor:
        """Return new random integers of ``width`` bits."""
        assert self._counter is not None
        places = torch.arange(self._drawn, self._drawn + count, device=self._counter.device)
        self._drawn += count
        # Numbers stay below 2**63: words of 32 bits times constants of 30.
        stream = _mixed((self._counter * 0x9E3779B) & _WORD).as_strided((), ())
        return _mixed((places * 0x3C6EF35F + stream) & _WORD) >> (32 - width)


def _mixed(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x35A2D97B) & _WORD
    return word ^ (word >> 15)
