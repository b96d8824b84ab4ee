"""The CTC loss as one operator of fixed shapes; torch's own keeps a workspace that has none."""

from __future__ import annotations

from typing import Any

import torch

from .library import define

aten = torch.ops.aten


def _loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = log_probs, targets, input_lengths, target_lengths
    losses, workspace = aten._ctc_loss.Tensor(*arguments, blank, zero_infinity)
    gradient = aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), *arguments, losses, workspace, blank, zero_infinity
    )
    return losses, gradient.contiguous()


def _fake(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, outer: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    return outer[:, None] * gradient, None, None, None, None, None


# The gradient of each sample's loss is computed along with it.
ctc_losses = define(
    "ctc_losses",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)",
    _loss,
    _fake,
    backward=_backward,
    setup_context=_remember,
)
