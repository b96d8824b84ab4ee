"""Attention over short sequences, by plain products.

ATen's kernel works through a sequence in blocks and computes the scores again in the backward pass,
so that they never have to be stored. Where all the scores of a head are no more than its queries
and keys, storing them costs little and saves that work.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the result and the logarithms of the sums, each (batch, head, query, ...)."""
    if not _is_short(query, key, value, dropout, attn_mask):
        return NotImplemented
    scores = _scores(query, key, causal, scale)
    largest = scores.amax(-1, keepdim=True)
    sums = largest + (scores - largest).exp().sum(-1, keepdim=True).log()
    return (scores - sums).exp() @ value, sums.squeeze(-1)


def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Three | Any:
    """Return the gradients of query, key and value."""
    if not _is_short(query, key, value, dropout, attn_mask):
        return NotImplemented
    # The same operators as in the forward pass: they are found to be the same and run once.
    shares = (_scores(query, key, causal, scale) - sums.unsqueeze(-1)).exp()
    through = gradient @ value.transpose(-1, -2)
    means = (gradient * result).sum(-1, keepdim=True)
    scores = shares * (through - means) * _factor(query, scale)
    return scores @ key, scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ gradient


def _is_short(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, mask: Any
) -> bool:
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    short = query.shape[-2] * key.shape[-2] <= query[0, 0].numel() + key[0, 0].numel()
    return same and short and not dropout and mask is None and query.dtype == torch.float32


def _scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    scores = (query @ key.transpose(-1, -2)) * _factor(query, scale)
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1]) ** -0.5 if scale is None else scale
