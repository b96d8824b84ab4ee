"""Choose the value that training minimises: the marked value or, if none is marked, the returned
number that is computed from all losses.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._base import nested_values, source
from .._base.errors import Error
from .._ir.block_labels import line_of
from .._ir.operators import functions_before, reachable
from .._ops.context import Candidate, Capture
from .recorded import original, recorded

_NAMES = [name for name in dir(F) if re.search("_loss$|cross_entropy|^kl_div$", name)]
MARK = "identity_loss"
# Some of them also exist under ``torch``, as other functions.
LOSS_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(owner, name): name for name in _NAMES for owner in (F, torch) if hasattr(owner, name)
}
# Operators that exported modules call.
for _name in (*_NAMES, "cross_entropy_loss", "nll_loss2d", "nll_loss_nd"):
    _packet = getattr(torch.ops.aten, _name, None)
    for _overload in _packet.overloads() if _packet is not None else ():
        LOSS_FUNCTIONS[getattr(_packet, _overload)] = _name


def final_loss(
    capture: Capture,
    model: nn.Module,
    returned: Sequence[torch.Tensor],
    structure: nested_values.Structure,
) -> torch.Tensor:
    """Return the marked value or, if none is marked, the returned scalar that depends on all losses
    with a gradient.

    A loss that is detached before it is returned, or computed under ``no_grad``, is a metric. An
    entry ``loss`` of a returned mapping or dataclass has precedence over other entries. Losses that
    no returned value depends on are used if no returned number has a gradient. Losses that
    ``forward`` itself differentiates, as in a step of meta-learning, are used if there are no
    others.
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
            fitting = _unused_losses(capture, results, returned, model)
    loss = _one(fitting, capture, model)
    if loss.tensor.numel() != 1:
        raise Error(
            "The loss must be a scalar tensor",
            got=f"{loss.function} of shape {tuple(loss.tensor.shape)}",
            where=loss.line,
            fix=(
                "return the mean of the loss as well: loss.mean()",
                "or mark the loss: poptorch.identity_loss(loss, reduction='mean')",
            ),
        )
    return loss.tensor


def _named(results: Sequence[Candidate], structure: nested_values.Structure) -> list[Candidate]:
    """Return the outermost entries that are called ``loss``."""
    level = [structure]
    while level:
        entries = [zip(part.keys or (), part.children, strict=False) for part in level]
        paths = {child.path for each in entries for key, child in each if key == "loss"}
        named = [each for each in results if each.function in paths and each.tensor.numel() == 1]
        if named:
            return named
        level = [child for part in level for child in part.children]
    return []


def _unused_losses(
    capture: Capture,
    results: Sequence[Candidate],
    returned: Sequence[torch.Tensor],
    model: nn.Module,
) -> list[Candidate]:
    """Return the losses to train on although no returned value depends on them."""
    able = [each for each in capture.losses if each.tensor.requires_grad]
    unused = [each for each in able if not _is_inner(each, capture)]
    seen = _before(returned)
    detached = [each for each in unused if recorded(each.tensor) in seen]
    left = _last([each for each in unused if each not in detached])
    numbers = [each for each in results if each.tensor.numel() == 1]
    if left and numbers:
        raise _not_minimised(
            f"the returned value is {numbers[0].function} at {numbers[0].line}, which does not "
            f"depend on {left[0].function} at {left[0].line}",
            numbers[0].line,
            left[0],
        )
    constant = [each for each in capture.losses if each not in able]
    sources = _before([each.tensor for each in numbers])
    metrics = detached or [each for each in constant if recorded(each.tensor) in sources]
    if metrics and not left:
        lines = (
            f"{each.function} at {each.line} is a metric, because it is detached"
            for each in metrics
        )
        raise _not_found(model, "\n".join(lines))
    return left or constant


def _not_found(model: nn.Module, got: str) -> Error:
    return Error(
        "Couldn't find a loss in graph",
        got=got,
        where=source.definition_line(type(model).forward),
        fix=(
            "compute the loss in forward with a torch.nn loss and return it",
            (
                "or, if you compute the loss yourself, mark it: poptorch.identity_loss(loss, "
                "reduction='mean')"
            ),
            "or return the loss as the entry 'loss' of a dict or a dataclass",
        ),
    )


def _one(fitting: Sequence[Candidate], capture: Capture, model: nn.Module) -> Candidate:
    if not fitting:
        name = type(model).__name__
        raise _not_found(
            model, (f"{name}.forward calls no loss function of torch and no identity_loss")
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
                (
                    "return metrics as value.detach(), and return a single number that is "
                    "computed from all losses"
                ),
                "or mark the total loss: poptorch.identity_loss(loss1 + loss2, reduction='sum')",
            ),
        )
    return outer[0]


def _without_gradient(loss: Candidate, capture: Capture) -> Error:
    before = _before([loss.tensor])
    ends = [end for node, end in capture.ends.items() if node in before]
    got, where = f"{loss.function} at {loss.line} does not depend on a trained parameter", loss.line
    if ends:
        got = f"{loss.function} at {loss.line}; the gradient ends at {ends[-1].function}"
        where = ends[-1].line
    return Error(
        "The loss has no gradient: there is nothing to train",
        got=got,
        where=where,
        fix="compute the loss from trained parameters, without detach, no_grad or argmax",
    )


def _check_unchanged(loss: Candidate, returned: Sequence[torch.Tensor]) -> None:
    if any(_same_values(loss.tensor, each) for each in returned):
        return
    scalars = (each for each in returned if each.numel() == 1)
    if any(_is_in(loss, _functions(each)) for each in scalars):
        raise _not_minimised(
            f"a value that is computed from {loss.function} at {loss.line}", loss.line, loss
        )


def _not_minimised(got: str, where: str | None, loss: Candidate) -> Error:
    return Error(
        "The returned value is not the loss that training would minimise",
        got=got,
        where=where,
        fix=(
            (
                "mark the value that training should minimise: poptorch.identity_loss(value, "
                "reduction='none')"
            ),
            (
                f"or, if training should minimise the result of {loss.function}, return that "
                "result as well"
            ),
        ),
    )


def _last(losses: Sequence[Candidate]) -> list[Candidate]:
    """Return the losses on which no other loss depends, with or without a gradient; of several
    marks of one tensor, the last.
    """
    latest = {id(each.tensor): each for each in losses}.values()
    nodes = {one: recorded(one.tensor) for one in latest}
    inputs = (node.all_input_nodes for node in nodes.values() if node is not None)
    before = reachable(itertools.chain(*inputs), lambda node: node.all_input_nodes)
    return [one for one in latest if nodes[one] not in before]


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two values are the same numbers, for example views, copies, or means of one
    element.
    """
    if first is second:
        return True
    one, other = original(first), original(second)
    return one is not None and one is other


def _before(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Return the values from which tensors are computed, including the tensors themselves."""
    nodes = [node for node in map(recorded, tensors) if node is not None]
    return reachable(nodes, lambda node: node.all_input_nodes)


def _functions(tensor: torch.Tensor) -> set[Any]:
    """Return the functions that the backward pass of a tensor calls."""
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
