"""``identity_loss``: marking the value that training minimises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._base.errors import AssertionFailure
from .._ops.context import listener

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.sum,
    "mean": torch.Tensor.mean,
    "none": lambda x: x,
}


def identity_loss(x: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Mark a value as the loss from which training starts.

    Outside a wrapped model it only reduces.

    Args:
        x: the value, of any shape.
        reduction: ``"sum"`` or ``"mean"`` for a scalar, ``"none"`` to keep the shape; gradients of
            one then flow into every element. Releases after 1.0 had no default.

    Returns:
        The reduced value.

    Raises:
        AssertionError: another reduction.
    """
    if reduction not in _REDUCTIONS:
        raise AssertionFailure(
            "Unsupported reduction type!",
            got=repr(reduction),
            fix='use "sum", "mean" or "none"',
        )
    loss = _REDUCTIONS[reduction](x)
    capture = listener()
    if capture is not None:
        capture.mark_loss(loss, "identity_loss")
    return loss
