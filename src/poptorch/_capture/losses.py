"""Which value training starts from: the marked one, else the returned number made of all losses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._base import source, trees
from .._base.errors import Error
from .._ir.blocks import line_of
from .._ir.operators import functions_before, reachable
from .._ops.context import Candidate, Capture
from .recorded import original, recorded

_NAMES = [name for name in dir(F) if re.search("_loss$|cross_entropy|^kl_div$", name)]
MARK = "identity_loss"
# Some of them exist under ``torch`` as well; the functions are others.
LOSS_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(owner, name): name for name in _NAMES for owner in (F, torch) if hasattr(owner, name)
}


def final_loss(
    capture: Capture, model: nn.Module, returned: Sequence[torch.Tensor], structure: trees.Structure
) -> torch.Tensor:
    """Return the marked value, else the returned scalar that all losses with a gradient reach.

    What is detached, or made under ``no_grad``, is a metric. A returned mapping's or dataclass's
    ``loss`` wins over other entries. Losses that reach nothing returned count if none does. Those
    that ``forward`` differentiates, as a step of meta-learning does, count if there are no others.
    """
    marks = [each for each in capture.losses if each.function == MARK]
    if marks:
        loss = _one(_last(marks), capture, model)
        _check_unchanged(loss, returned)
        return loss.tensor
    losses = [each for each in capture.losses if each.tensor.requires_grad]
    results = [
        Candidate(tensor, path, _line_of(tensor))
        for tensor, path in zip(returned, structure.paths, strict=True)
        if tensor.requires_grad
    ]
    fitting = _named(results, structure)
    if not fitting:
        above = {each: _functions(each.tensor) for each in results}
        used = [one for one in losses if any(_is_in(one, before) for before in above.values())]
        if used:
            used = [one for one in used if not _is_inner(one, capture)] or used
            made = [each for each in results if all(_is_in(one, above[each]) for one in used)]
            fitting = [each for each in made if each.tensor.numel() == 1] or _last(used)
        else:
            unused = [one for one in losses if not _is_inner(one, capture)]
            fitting = _last(unused) or [one for one in capture.losses if one not in losses]
    loss = _one(fitting, capture, model)
    if loss.tensor.numel() != 1:
        raise Error(
            "The loss must be a scalar tensor",
            got=f"{loss.function} of shape {tuple(loss.tensor.shape)}",
            where=loss.line,
            fix=(
                "return its mean, too",
                "mark the value: poptorch.identity_loss(loss, reduction='mean')",
            ),
        )
    return loss.tensor


def _named(results: Sequence[Candidate], structure: trees.Structure) -> list[Candidate]:
    """The outermost of the entries that are called ``loss``."""
    level = [structure]
    while level:
        entries = [zip(part.keys or (), part.children, strict=False) for part in level]
        paths = {child.path for each in entries for key, child in each if key == "loss"}
        named = [each for each in results if each.function in paths and each.tensor.numel() == 1]
        if named:
            return named
        level = [child for part in level for child in part.children]
    return []


def _one(fitting: Sequence[Candidate], capture: Capture, model: nn.Module) -> Candidate:
    if not fitting:
        raise Error(
            "Couldn't find a loss in graph",
            got=f"{type(model).__name__}.forward called no torch loss and no identity_loss",
            where=source.definition_line(type(model).forward),
            fix=(
                "compute the loss in forward with a torch.nn loss and return it",
                "mark a loss of your own: poptorch.identity_loss(loss, reduction='mean')",
                "or return it as the entry 'loss' of a dict or a dataclass",
            ),
        )
    able = [each for each in fitting if each.tensor.requires_grad]
    if not able:
        raise _without_gradient(fitting[-1], capture)
    outer = [each for each in able if not _is_inner(each, capture)] or able
    if any(not _same_values(each.tensor, outer[0].tensor) for each in outer):
        raise Error(
            "Multiple independent losses found in graph",
            got="\n".join(f"{each.function} at {each.line}" for each in outer),
            where=source.definition_line(type(model).forward),
            fix=(
                "return metrics as value.detach(), and one single number made of all losses",
                "or mark it: poptorch.identity_loss(loss1 + loss2, reduction='sum')",
            ),
        )
    return outer[0]


def _without_gradient(loss: Candidate, capture: Capture) -> Error:
    node = recorded(loss.tensor)
    before = reachable([node] if node else [], lambda node: node.all_input_nodes)
    ends = [end for node, end in capture.ends.items() if node in before]
    got, where = f"{loss.function} at {loss.line}: no trained parameter leads to it", loss.line
    if ends:
        got = f"{loss.function} at {loss.line}; the gradient ends at {ends[-1].function}"
        where = ends[-1].line
    return Error(
        "The loss has no gradient: there is nothing to train",
        got=got,
        where=where,
        fix="compute it from trained parameters, without detach, no_grad and argmax",
    )


def _check_unchanged(loss: Candidate, returned: Sequence[torch.Tensor]) -> None:
    if any(_same_values(loss.tensor, each) for each in returned):
        return
    scalars = (each for each in returned if each.numel() == 1)
    if any(_is_in(loss, _functions(each)) for each in scalars):
        raise Error(
            "The returned value is not the loss that training would follow",
            got=f"a value that was computed from {loss.function} at {loss.line}",
            where=loss.line,
            fix=(
                "mark the final value: poptorch.identity_loss(value, reduction='none')",
                f"or return the result of {loss.function}, too, if training should follow that",
            ),
        )


def _last(losses: Sequence[Candidate]) -> list[Candidate]:
    """Those that lead to no other, with a gradient or without; of marks of one tensor the last."""
    latest = {id(each.tensor): each for each in losses}.values()
    nodes = {one: recorded(one.tensor) for one in latest}
    inputs = (node.all_input_nodes for node in nodes.values() if node is not None)
    before = reachable(itertools.chain(*inputs), lambda node: node.all_input_nodes)
    return [one for one in latest if nodes[one] not in before]


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two values are the same numbers: views, copies, means over a single element."""
    if first is second:
        return True
    one, other = original(first), original(second)
    return one is not None and one is other


def _functions(tensor: torch.Tensor) -> set[Any]:
    """What the backward pass of a tensor calls."""
    first = tensor.grad_fn
    return set() if first is None else reachable([first], functions_before)


def _is_in(loss: Candidate, functions: set[Any]) -> bool:
    return loss.tensor.grad_fn in functions


def _is_inner(loss: Candidate, capture: Capture) -> bool:
    return any(_is_in(loss, _functions(each)) for each in capture.differentiated)


def _line_of(tensor: torch.Tensor) -> str | None:
    node = recorded(tensor)
    line = line_of(node) if node else None
    return source.describe(*line) if line else None
