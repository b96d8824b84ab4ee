"""Gradients that ``forward`` of an inference model computes: forces, for example.

Inference records no gradients, as PopTorch's. Where ``forward`` asks for some, it is captured again
as eager torch runs it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from .._base import private, trees
from .._ops.context import Capture


class NeedsGradient(BaseException):
    """Inference asks for the gradient of a value that was computed without."""


def check(capture: Capture, outputs: Any) -> None:
    """Raise if the values that are differentiated would have a gradient in eager torch only."""
    if capture.training or capture.differentiates:
        return
    if not any(each.requires_grad for each in trees.flatten(outputs)[0]):
        raise NeedsGradient


def followed(capture: Capture) -> contextlib.AbstractContextManager[None]:
    """Let ``torch.autograd.backward`` ask, which no mode of torch sees."""
    thread = threading.get_ident()

    def backward(usual: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            check(capture, tensors)
        return usual(tensors, *args, **kwargs)

    return private.replaced(torch.autograd, "backward", backward)
