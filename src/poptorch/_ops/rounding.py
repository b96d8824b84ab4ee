"""Round to a narrower type at random, so that the expected value is exact."""

from __future__ import annotations

import torch

DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}
"""For each type, the number of bits of a float32 mantissa that it lacks."""

_LARGEST_SUBNORMAL = 2.0**-14
_SUBNORMALS_PER_ONE = 2.0**24


def rounded(value: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 according to random ``bits``, integers below ``1 << DROPPED_BITS[dtype]``."""
    width = DROPPED_BITS[dtype]
    cut = (value.view(torch.int32) + bits.to(torch.int32)) & -(1 << width)
    result = cut.view(torch.float32)
    if dtype == torch.float16:
        # Below the normal numbers, the distance between neighbours no longer depends on the
        # exponent.
        steps = torch.floor(value * _SUBNORMALS_PER_ONE + bits * 2.0**-width)
        small = value.abs() < _LARGEST_SUBNORMAL
        result = torch.where(small, steps / _SUBNORMALS_PER_ONE, result)
    exact = torch.where(torch.isfinite(value), result, value)
    # Programs that round at random would treat ``to`` as a conversion that needs rounding.
    return torch.ops.prims.convert_element_type.default(exact, dtype)  # type: ignore[no-any-return]


def rounded_at_random(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(
        0, 1 << DROPPED_BITS[dtype], value.shape, dtype=torch.int32, device=value.device
    )
    return rounded(value, dtype, bits)
