"""Define rules for lanes with symbolic sizes where the rules of ``vmap`` need numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._ir.operators import aten
from .._ir.symbolic import has_symbols
from .batched import BatchedCall, LaneRule

_NONE, _MEAN = 0, 1  # reductions of a loss, as operators name them


def sized(call: BatchedCall) -> Any:
    """Return the results of an operator, if it has such a rule, and symbols in its operands."""
    rule = RULES.get(call.node.target)
    operands = (each.meta.get("val") for each in call.node.all_input_nodes)
    shapes = [each.shape for each in operands if isinstance(each, torch.Tensor)]
    return rule(call) if rule is not None and any(map(has_symbols, shapes)) else NotImplemented


def _joined(call: BatchedCall) -> Any:
    parts: Any = call.node.args[0]
    rank = len(call.shape)
    if any(each.meta["val"].dim() != rank for each in parts):
        return NotImplemented
    lanes = [
        value if each in call.inputs else value.expand(call.count, *value.shape)
        for each, value in zip(parts, call.args[0], strict=True)
    ]
    return torch.cat(lanes, call.get(1, 0) % rank + 1)


def _along(call: BatchedCall) -> Any:
    """Gather or scatter along a dimension."""
    rank = call.node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if not rank:
        return NotImplemented
    args = [
        call.lanes(at) if isinstance(each, torch.Tensor) else each
        for at, each in enumerate(call.args)
    ]
    args[1] = call.args[1] % rank + 1
    return call.run(*args)


def _nll_loss(call: BatchedCall) -> Any:
    """Return the loss of each lane, and how many rows count in it."""
    if not _is_plain(call, 0):
        return NotImplemented
    scores, labels = call.lanes(0), call.lanes(1)
    _, _, _, reduction, ignored = call.args
    counts = labels != ignored
    chosen = torch.where(counts, labels, 0)[..., None]
    losses = torch.where(counts, -scores.gather(2, chosen).squeeze(2), 0)
    if reduction == _NONE:
        return losses, scores.new_zeros(call.count)
    rows, total = counts.sum(1).to(scores.dtype), losses.sum(1, dtype=scores.dtype)
    return (total / rows if reduction == _MEAN else total), rows


def _nll_loss_backward(call: BatchedCall) -> Any:
    if not _is_plain(call, 1):
        return NotImplemented
    gradient, scores, labels = (call.lanes(at) for at in range(3))
    _, _, _, _, reduction, ignored, _ = call.args
    if reduction == _MEAN:
        gradient = gradient / call.lanes(6)
    gradient = gradient[..., None] if reduction == _NONE else gradient[:, None, None]
    counts = labels != ignored
    chosen = torch.where(counts, labels, 0)[..., None]
    places = torch.zeros_like(scores).scatter(2, chosen, -1.0)
    return places * torch.where(counts[..., None], gradient, 0)


def _is_plain(call: BatchedCall, at: int) -> bool:
    """Return whether a loss has rows of scores, and classes without weights."""
    scores = call.node.args[at].meta["val"]  # type: ignore[union-attr]
    return scores.dim() == 2 and call.args[at + 2] is None


RULES: Mapping[Any, LaneRule] = {
    aten.cat.default: _joined,
    aten.gather.default: _along,
    aten.scatter.src: _along,
    aten.scatter.value: _along,
    aten.scatter_add.default: _along,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
