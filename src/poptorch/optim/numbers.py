"""The numbers of an optimizer: those of its attributes, of its groups, and loaded ones.

On the device they are float32, whatever the type of the weights (PopTorch user guide,
"Optimizers", calls them float tensors in ``ipu_param``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._base.errors import AssertionFailure, InvalidValue

SCALINGS = ("loss_scaling", "velocity_scaling")  # gradients are multiplied and divided by them
LARGEST = torch.finfo(torch.float32).max


def number(name: str, value: Any) -> float:
    """Return the value of a hyper-parameter.

    Args:
        name: its attribute, for messages.
        value: a number, or a tensor of one.

    Raises:
        AssertionError: it is no number.
        ValueError: it is finite and float32 cannot hold it, or it is no scaling.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise AssertionFailure(
            f"Expected a number for {name}", got=repr(value), fix="use a number, such as 0.1"
        )
    check_size(name, value)
    if name in SCALINGS and not 0 < value < math.inf:
        raise InvalidValue(f"{name} must be a positive number", got=repr(value))
    return float(value)


def check_size(name: str, value: Any) -> None:
    """Refuse a number that float32 cannot hold.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(value, torch.Tensor):
        value = value.item()
    if abs(value) > LARGEST and not _is_infinite(value):
        raise InvalidValue(
            f"The number given for {name} is too large",
            got=f"{_shown(value)}; on the device the numbers of an optimizer are float32, whatever "
            "the type of the weights",
            fix=f"use one between -{LARGEST:.3g} and {LARGEST:.3g}",
        )


def _shown(value: float) -> str:
    return repr(value) if isinstance(value, float) else f"an integer of {value.bit_length()} bits"


def _is_infinite(value: float) -> bool:
    return isinstance(value, float) and math.isinf(value)
