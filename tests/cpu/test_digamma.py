"""``digamma`` with vector instructions is as exact as numbers can be."""

import math

import mpmath
import pytest
import torch

from poptorch._cpu.digamma import digamma

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@BOTH
def test_digamma_is_exact_to_the_last_digits(dtype: torch.dtype) -> None:
    x = torch.cat([torch.logspace(-30, 30, 301), torch.linspace(-20.3, 20, 2000)]).to(dtype)
    exact = torch.tensor([float(mpmath.digamma(v)) for v in x.tolist()], dtype=torch.float64)

    error = (digamma(x) - exact).abs() / (1 + exact.abs())

    assert error.max() <= 8 * torch.finfo(dtype).eps


@BOTH
def test_poles_and_infinities_have_torchs_values(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, -1.0, -7.0, math.inf, -math.inf, math.nan], dtype=dtype)
    torch.testing.assert_close(digamma(special), torch.digamma(special), equal_nan=True)


def test_integers_are_left_to_torch() -> None:
    assert not digamma.applies(torch.arange(3))
