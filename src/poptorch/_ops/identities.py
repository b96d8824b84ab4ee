"""Identities that mean something: ``nop``, hints that a capture reads, other gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from .library import define


class Hint(enum.StrEnum):
    """What a hint says about a tensor."""

    AVAILABLE_MEMORY = "available_memory"
    OVERLAP_INPUT = "overlap_input"
    OVERLAP_OUTPUT = "overlap_output"
    KEEP = "keep"


def _copy(x: torch.Tensor, *_: str) -> torch.Tensor:
    return x.clone()


def _like(x: torch.Tensor, *_: str) -> torch.Tensor:
    return torch.empty_like(x)


def _pass_on(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _pass_on_hint(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return gradient, None, None, None


def _batched_nop(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor) -> tuple[Any, Any]:
    return nop(x), in_dims[0]


def _batched_hint(
    info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: str
) -> tuple[Any, Any]:
    return hint(x, *rest), in_dims[0]


nop = define("nop", "(Tensor x) -> Tensor", _copy, _like, backward=_pass_on, vmap=_batched_nop)
hint = define(
    "hint",
    "(Tensor x, str kind, str value, str where) -> Tensor",
    _copy,
    _like,
    backward=_pass_on_hint,
    vmap=_batched_hint,
)


def _copy_after(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return x.clone()


# A value as it is at a moment of the backward pass: nothing computed from it can be moved to before
# that moment, or be taken for what was computed in the forward pass.
after_gradient = define(
    "after_gradient", "(Tensor x, Tensor gradient) -> Tensor", _copy_after, _copy_after
)

Rule = Callable[[torch.Tensor], torch.Tensor]


# What forward computes and what backward does are two plain functions of tensors.
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
