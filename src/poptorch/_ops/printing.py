"""The operator behind ``ipu_print_tensor``: prints when it runs; its gradient prints too."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .context import listener
from .effects import define_effect
from .formatting import Layout, tensor_text


def _print(
    x: torch.Tensor, title: str, gradient_title: str, layout: str, after: list[torch.Tensor]
) -> torch.Tensor:
    if listener() is None:  # a capture on real tensors is no execution
        print(tensor_text(title, x, Layout.from_text(layout)), file=sys.stderr, flush=True)
    return x.clone()


def _fake(
    x: torch.Tensor, title: str, gradient_title: str, layout: str, after: list[torch.Tensor]
) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.title, ctx.layout, _ = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    if ctx.title:
        gradient = print_tensor(gradient, ctx.title, "", ctx.layout, [])
    return gradient, None, None, None, []


print_tensor = define_effect(
    "print_tensor",
    "(Tensor x, str title, str gradient_title, str layout, Tensor[] after) -> Tensor",
    _print,
    _fake,
    backward=_backward,
    setup_context=_remember,
)
