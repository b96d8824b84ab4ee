"""Provide ``for_loop`` and ``cond``: control flow that runs in the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._base.errors import InvalidValue
from .._ops import effects
from .._ops.context import Capture, eager_run, listener
from . import operand_checks
from .operand_checks import describe, kinds_of


def for_loop(
    count: int, body: Callable[..., Any], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a body a fixed number of times. Its outputs are the inputs of the next iteration.

    Python runs the body once, to capture it, so its side effects on Python objects happen once. The
    body may use tensors from outside. Inputs are passed by value. Outside a wrapped model, Python
    calls the body ``count`` times.

    Args:
        count: number of iterations.
        body: takes the inputs as separate arguments and returns the same number of tensors, with
            the same shapes and dtypes. A single tensor need not be in a list.
        inputs: the tensors that the first iteration receives.

    Returns:
        A list of the tensors that the last iteration returned.

    Raises:
        ValueError: ``inputs`` is not a list of tensors.
        poptorch.Error: in a training model, or if the body returns other shapes than it takes.
    """
    _check_list(inputs, "inputs")
    fits = isinstance(count, int) and not isinstance(count, bool) and count >= 0
    title = "The count of a for_loop must be a Python integer that is not negative"
    fix = "pass an int; the number of iterations is fixed when the model is compiled"
    operand_checks.that(fits, title, repr(count), fix)
    expected = kinds_of(inputs)

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        results = _as_list(body(*values))
        got = kinds_of(results)
        operand_checks.that(
            got == expected,
            "The body of a for_loop must return tensors like its inputs",
            f"{describe(got)} for inputs {describe(expected)}",
            "return one tensor of the same shape and dtype for each input",
        )
        return results

    capture = listener()
    if capture is None:
        values = [tensor.clone() for tensor in inputs]
        for _ in range(count):
            values = step(*values)
        return values
    instead = "use a Python loop in forward: for i in range(count): ..."
    _only_inference(capture, "for_loop()", instead)
    graph, captured = capture.body(step, inputs)
    return effects.repeat(count, graph, inputs, captured)


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Run one of two bodies. A tensor decides which one when the program runs.

    Both are captured. Inputs are passed by value.

    Args:
        condition: a boolean tensor with one element.
        then_body, else_body: return a tensor, or a tuple or list of tensors. Both return the same
            number of tensors with the same dtypes. If shapes differ, the results have the shapes
            of ``else_body``.
        then_inps, else_inps: lists of tensors, the arguments of the bodies.

    Returns:
        A list of what the chosen body returned.

    Raises:
        ValueError: the inputs are not lists of tensors.
        poptorch.Error: in a training model, or if the results of the bodies do not match.
    """
    _check_list(then_inps, "then_inps")
    _check_list(else_inps, "else_inps")
    operand_checks.tensor(condition, "The condition of cond must be a torch.tensor")
    title, got = "The condition of cond must have one element", f"shape {tuple(condition.shape)}"
    operand_checks.that(
        condition.numel() == 1, title, got, "reduce it: condition.any() or condition.all()"
    )
    capture = listener()
    if capture is None:
        body, inputs = (then_body, then_inps) if condition else (else_body, else_inps)
        results = _as_list(body(*(tensor.clone() for tensor in inputs)))
        # this run is compared with a program, so its results need the shapes of the program
        if eager_run() is not None and condition:
            expected = [other.shape for other in _as_list(else_body(*else_inps))]
            results = [each.reshape(shape) for each, shape in zip(results, expected, strict=True)]
        return results
    instead = "compute both results, and select one: torch.where(condition, a, b)"
    _only_inference(capture, "cond()", instead)
    taken, taken_captured = capture.body(lambda *args: _as_list(then_body(*args)), then_inps)
    other, other_captured = capture.body(lambda *args: _as_list(else_body(*args)), else_inps)
    shapes = _common_shapes(taken, other)
    first = [*then_inps, *taken_captured]

    def then_branch(*values: torch.Tensor) -> list[torch.Tensor]:
        results = taken(*values[: len(first)])
        return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]

    def else_branch(*values: torch.Tensor) -> list[torch.Tensor]:
        return list(other(*values[len(first) :]))

    operands = [*first, *else_inps, *other_captured]
    return effects.branch(condition.to(torch.bool), then_branch, else_branch, operands)


def _check_list(value: Any, name: str) -> None:
    if not isinstance(value, list):
        raise InvalidValue(
            "Object is not list",
            got=f"{name} is {type(value).__name__}",
            fix=f"pass {name} as a list of tensors",
        )
    for at, item in enumerate(value):
        if not isinstance(item, torch.Tensor):
            raise InvalidValue(
                f"Object contained in list at index {at} is not torch.tensor",
                got=f"{name}[{at}] is {type(item).__name__} {item!r}",
                fix=(
                    "pass only tensors; use other values directly in the body of the loop or "
                    "branch, where they are constants"
                ),
            )


def _only_inference(capture: Capture, function: str, fix: str) -> None:
    title = f"{function} is only supported in inference"
    operand_checks.that(
        not capture.training, title, f"a call of {function} in a training model", fix
    )


def _as_list(returned: Any) -> list[torch.Tensor]:
    title = "The body of a loop or branch must return a tensor, or a tuple or list of tensors"
    return operand_checks.tensors(returned, title)


def _common_shapes(*bodies: torch.fx.GraphModule) -> list[tuple[int, ...]]:
    results: list[Any] = [body.graph.output_node().args[0] for body in bodies]
    taken, other = ([node.meta["val"] for node in nodes] for nodes in results)
    operand_checks.that(
        [(t.numel(), t.dtype) for t in taken] == [(t.numel(), t.dtype) for t in other],
        "Both bodies of a cond must return the same number of tensors, of the same dtypes "
        "and sizes",
        f"{describe(kinds_of(taken))} and {describe(kinds_of(other))}",
        "return tensors of the same shapes and types from both bodies",
    )
    return [tuple(t.shape) for t in other]
