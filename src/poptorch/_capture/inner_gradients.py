"""Support gradients that ``forward`` of an inference model computes, for example forces.

As in PopTorch, inference records no gradients. If ``forward`` asks for some, it is captured again
with gradients, as in eager torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from .._base import nested_values, private
from .._ops.context import Capture


class NeedsGradient(BaseException):
    """Inference asks for the gradient of a value that was computed without gradients."""


def check(capture: Capture, outputs: Any) -> None:
    """Raise the exception if the differentiated values would have a gradient in eager torch, but
    not here.
    """
    if capture.training or capture.differentiates:
        return
    if not any(each.requires_grad for each in nested_values.flatten(outputs)[0]):
        raise NeedsGradient


def followed(capture: Capture) -> contextlib.AbstractContextManager[None]:
    """Intercept ``torch.autograd.backward``, which no mode of torch sees."""
    thread = threading.get_ident()

    def backward(usual: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            check(capture, tensors)
        return usual(tensors, *args, **kwargs)

    return private.replaced(torch.autograd, "backward", backward)
