"""Host code that clips the gradients of a wrapped model, which stay in the program."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from .._base import log

_CLIPPING = "torch.nn.utils.clip_grad"
_FAR = 12  # frames between the function that clips and its look at a parameter


def say_clipping(module: nn.Module) -> bool:
    """Warn if a function of torch that clips gradients looks at a module now, and finds none.

    Returns:
        Whether it does.
    """
    caller = _clipping()
    if caller is None or any(weight.grad is not None for weight in module.parameters()):
        return False
    log.python.warning(
        "%s finds no gradients in a model that is wrapped for training: they stay in the program, "
        "and are not clipped. Give the limit to the optimizer: the argument max_grad_norm of SGD, "
        "Adam and AdamW of poptorch.optim; of torch's, the attribute, set before wrapping",
        caller,
    )
    return True


def _clipping() -> str | None:
    """Return the name of the function of torch that clips gradients and is running."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FAR):
        if frame is None:
            break
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _CLIPPING and name.startswith("clip_grad"):
            return name
        frame = frame.f_back
    return None
