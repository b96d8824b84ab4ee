"""Define identities with a meaning: ``nop``, hints for a capture, and replaced gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from .library import define


class Hint(enum.StrEnum):
    AVAILABLE_MEMORY = "available_memory"
    OVERLAP_INPUT = "overlap_input"
    OVERLAP_OUTPUT = "overlap_output"
    KEEP = "keep"


def _copy(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.clone()


def _identity(name: str, arguments: str = "") -> Any:
    def pass_on(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *[None] * arguments.count(",")

    def batched(info: Any, in_dims: Any, x: torch.Tensor, *rest: str) -> tuple[Any, Any]:
        return operator(x, *rest), in_dims[0]

    schema = f"(Tensor x{arguments}) -> Tensor"
    operator = define(name, schema, _copy, _copy, backward=pass_on, vmap=batched)
    return operator


nop = _identity("nop")
hint = _identity("hint", ", str kind, str value, str where")

# A value at some moment of the backward pass. What is computed from it cannot be moved to an
# earlier time, or be identified with a value from the forward pass.
after_gradient = define("after_gradient", "(Tensor x, Tensor gradient) -> Tensor", _copy, _copy)

GradientRule = Callable[[torch.Tensor], torch.Tensor]


# Forward and backward are two separate functions of tensors.
class _SurrogateGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, carrier: torch.Tensor, rule: GradientRule) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, ctx.rule = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.rule(gradients[0]), None


def with_surrogate_gradient(
    value: torch.Tensor, carrier: torch.Tensor, rule: GradientRule
) -> torch.Tensor:
    result: torch.Tensor = _SurrogateGradient.apply(value.detach(), carrier, rule)  # type: ignore[no-untyped-call]
    return result
