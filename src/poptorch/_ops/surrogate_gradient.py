"""A value whose gradient goes where, and as, a rule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[[torch.Tensor], torch.Tensor]


class _SurrogateGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, carrier: torch.Tensor, rule: Rule) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, ctx.rule = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.rule(gradients[0]), None


def with_surrogate_gradient(value: torch.Tensor, carrier: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return a value that hands its gradient to another tensor."""
    result: torch.Tensor = _SurrogateGradient.apply(value.detach(), carrier, rule)  # type: ignore[no-untyped-call]
    return result
