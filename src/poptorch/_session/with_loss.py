"""The form of 1.0: a loss appended to the model (PopTorch user guide, "Options")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def with_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs the model on its arguments, then a loss on the output."""

    def forward(args: Any, loss_inputs: Any = None) -> tuple[Any, Any]:
        if isinstance(args, dict):
            output = model(**args)
        elif isinstance(args, (list, tuple)):
            output = model(*args)
        else:
            output = model(args)
        return output, loss(output) if loss_inputs is None else loss(output, loss_inputs)

    return forward
