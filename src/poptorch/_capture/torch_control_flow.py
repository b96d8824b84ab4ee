"""Support torch's control flow in ``forward``: unroll loops of known length, and record the rest.

In eager code, ``torch.cond``, ``while_loop``, ``scan`` and ``map`` use Dynamo, which finds the
outside tensors that their bodies use. Within a capture, ``torch.compile`` returns functions
unchanged (``replaced_tensors``), so that Dynamo does not remember frames that it had to skip. The
operators are then called with the user's own functions as bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._base import nested_values, private
from .._base.errors import Error
from .._ir.operators import storage_root, written_by
from .._ops import effects
from .._ops.context import Capture
from .recorded import constant_value
from .trace import untraced

Body = Callable[..., Any]
Within = Callable[[Body], Body]
"""Makes the capture's own functions available to a function, as they are to ``forward``."""


def replacement(operator: Any) -> Callable[..., Any] | None:
    """Return the replacement of one of torch's higher-order operators, if there is one."""
    if getattr(operator, "namespace", None) != "higher_order" or effects.recording.get():
        return None
    return _REPLACEMENTS.get(operator.name())


def refuse_writes(graph: fx.Graph, to_inputs: bool = False) -> None:
    """Refuse a body that writes to outside tensors, because only returned values leave it."""
    outside = ("get_attr", "placeholder") if to_inputs else ("get_attr",)
    for node in graph.nodes:
        if any(storage_root(each).op in outside for each in written_by(node)):
            raise Error(
                "The body of a loop or branch writes to a tensor that was created outside of it",
                got=f"{node.target} changes a tensor that the body does not create",
                fix=(
                    "return the new value from the body, and assign it after the loop or branch",
                    "or change a copy of the tensor: tensor.clone()",
                ),
            )


def _scan(
    _: Capture,
    within: Within,
    combine: Body,
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor] = (),
) -> Any:
    carried, steps = list(init), []
    step = within(combine)
    for at in range(len(xs[0])):
        result = step(*carried, *(each.select(0, at) for each in xs), *additional_inputs)
        values, structure = nested_values.flatten(result)
        carried = values[: len(init)]
        steps.append(values[len(init) :])
    stacked = (torch.stack(each) for each in zip(*steps, strict=True))
    return structure.unflatten([*carried, *stacked])


def _map(
    _: Capture,
    within: Within,
    function: Body,
    xs: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
) -> Any:
    each_one = within(function)
    results = [
        nested_values.flatten(each_one(*(x.select(0, at) for x in xs), *others))
        for at in range(len(xs[0]))
    ]
    stacked = [torch.stack(each) for each in zip(*(values for values, _ in results), strict=True)]
    return results[0][1].unflatten(stacked)


def _cond(
    capture: Capture,
    within: Within,
    condition: Any,
    taken: Body,
    otherwise: Body,
    operands: Sequence[torch.Tensor] = (),
) -> Any:
    known = constant_value(condition) if isinstance(condition, torch.Tensor) else condition
    if known is not None:
        with untraced():
            decided = bool(known)
        return within(taken if decided else otherwise)(*operands)
    bodies = [_RecordedBody(capture, within(body), operands) for body in (taken, otherwise)]
    _refuse_gradient("torch.cond", [each for body in bodies for each in body.outer], operands)
    first, second = bodies
    difference = nested_values.first_difference(first.structure, second.structure)
    if difference is not None or first.kinds != second.kinds:
        raise Error(
            "Both branches of torch.cond must return the same kinds of tensors",
            got=str(difference or f"{first.kinds} and {second.kinds}"),
            fix="return tensors of the same shapes and types, in the same structure, from both",
        )
    count, own = len(operands), len(operands) + len(first.outer)
    results = effects.branch(
        condition.to(torch.bool),
        lambda *values: list(first.graph(*values[:own])),
        lambda *values: list(second.graph(*values[:count], *values[own:])),
        [*operands, *first.outer, *second.outer],
    )
    return first.structure.unflatten(results)


def _while_loop(
    capture: Capture,
    within: Within,
    test: Body,
    body: Body,
    carried: Sequence[Any],
    others: Sequence[torch.Tensor] = (),
    **_: Any,
) -> Any:
    numbers = [each for each in carried if not isinstance(each, torch.Tensor)]
    if numbers:
        raise Error(
            "while_loop has a Python number among its loop variables",
            got=f"the loop changes {numbers[0]!r}, which is not a tensor",
            fix=f"use a tensor instead: torch.tensor({numbers[0]!r})",
        )
    predicate, step = (
        _RecordedBody(capture, within(function), [*carried, *others]) for function in (test, body)
    )
    _refuse_gradient("while_loop", [*predicate.outer, *step.outer], [*carried, *others])
    count, own = len(carried) + len(others), len(carried) + len(others) + len(predicate.outer)
    results = effects.loop(
        lambda *values: predicate.graph(*values[:own])[0],
        lambda *values: list(step.graph(*values[:count], *values[own:])),
        carried,
        [*others, *predicate.outer, *step.outer],
    )
    return step.structure.unflatten(results)


class _RecordedBody:
    """The graph of a body, and the outside tensors that it gets as its last arguments."""

    structure: nested_values.Structure

    def __init__(self, capture: Capture, body: Body, inputs: Sequence[torch.Tensor]) -> None:
        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            tensors, self.structure = nested_values.flatten(body(*values))
            return tensors

        self.graph, self.outer = capture.body(flat, inputs, keeps_inputs=True)

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        results: Any = self.graph.graph.output_node().args[0]
        return [(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in results]


def _refuse_gradient(
    name: str, outer: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> None:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*outer, *operands)):
        raise Error(
            f"{name} has no gradient in a compiled program",
            got="some of its operands need a gradient",
            fix=(
                "compute both results and choose one: torch.where(condition, a, b)"
                if name == "torch.cond"
                else "use a Python loop with a fixed number of steps",
                "if you need no gradient, call it within torch.no_grad(), or detach its operands",
            ),
        )


def _flex_attention(
    _: Capture,
    within: Within,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: Body,
    block_mask: tuple[Any, ...],
    *rest: Any,
) -> Any:
    *blocks_of_mask, mask = block_mask
    whole = (*blocks_of_mask, within(mask))
    return private.math_attention(query, key, value, within(score), whole, *rest)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scan": _scan,
    "map_impl": _map,
    "cond": _cond,
    "while_loop": _while_loop,
    "flex_attention": _flex_attention,
}
