"""Provide ``custom_op``: programs call the user's functions through two opaque operators."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._base import private
from .._base.errors import Error, InvalidValue
from .._ops.context import listener, outermost
from .._ops.library import copied, define
from . import known_custom_ops, operand_checks
from .operand_checks import TensorKind, kinds_of

OperatorAttributes = Mapping[str, Any]
OperatorForward = Callable[[list[torch.Tensor], OperatorAttributes], Sequence[torch.Tensor]]
OperatorBackward = Callable[
    [list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], OperatorAttributes],
    Sequence[torch.Tensor | None],
]


_registered: dict[str, tuple[OperatorForward, OperatorBackward | None]] = {}
_TABLE = "use ASCII strings as keys, and numbers, bools, ASCII strings or lists of these as values"
_ATTRIBUTES_AS_TEXT = (
    "pass the attributes as a JSON object, as captured custom operators have them: "
    """accessAttributes('{"alpha": 0.5}')"""
)
# For each type: the name of such numbers, and the smallest and largest valid one.
_RANGES: dict[type, tuple[str, float, float]] = {
    float: ("Popart float", torch.finfo(torch.float32).min, torch.finfo(torch.float32).max),
    int: ("64-bit integer", torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max),
}


def _key_of(name: str, domain: str, version: object) -> str:
    return f"{domain}:{name}:{version}"


def register_custom_op(
    name: str,
    domain: str,
    version: int,
    forward: OperatorForward,
    backward: OperatorBackward | None = None,
) -> None:
    """Register an operator for ``custom_op``, or replace it.

    The functions run as ordinary Python, and may use any library.

    Args:
        name, domain, version: identify the operator for ``custom_op``.
        forward: ``forward(inputs, attributes)`` returns a list of tensors.
        backward: ``backward(inputs, outputs, output_gradients, attributes)`` returns one gradient
            or None for each input. Without it, training needs a ``forward`` of differentiable
            torch operators.
    """
    fits = callable(forward) and (backward is None or callable(backward))
    got = f"forward={forward!r}, backward={backward!r}"
    fix = "for example poptorch.register_custom_op('Cube', 'custom.ops', 1, forward, backward)"
    operand_checks.that(
        fits, "register_custom_op needs functions for forward and backward", got, fix
    )
    _registered[_key_of(name, domain, version)] = forward, backward


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Call a custom operator.

    The operator is one that you registered with ``register_custom_op``. Otherwise it is
    ``torch.ops.<domain>.<name>``, with underscores instead of dots in the domain, and it takes the
    attributes by keyword. Its gradient is the one that is registered for it, or the operator
    ``<name>Grad``, which takes the inputs and the gradients of the outputs. Some compiled plug-ins
    of public programs are built in: see ``docs/guide/custom_ops.md``.

    Args:
        inputs: a tuple or list of tensors.
        name, domain, domain_version: identify the registered operator.
        example_outputs: tensors with the shapes and dtypes of the results. Their values have no
            effect, so you can pass the inputs. 64-bit examples describe 32-bit results.
        attributes: numbers, ASCII strings, or lists of values of one of these types.

    Returns:
        A list of the results.

    Raises:
        ValueError: an attribute has another type.
        poptorch.Error: the operator is unknown, its results differ from the examples in shape or
            dtype, or a training model needs a gradient that the operator does not have.
    """
    tensors, templates = list(inputs), list(example_outputs)
    for value in (*tensors, *templates):
        operand_checks.tensor(
            value, f"custom_op '{name}' must take torch.tensor inputs and examples"
        )
    checked = _checked(attributes or {})
    key = _key_of(name, domain, domain_version)
    if key in _registered:
        return _of_user(key, tensors, kinds_of(templates), checked)
    library = getattr(torch.ops, domain.replace(".", "_"))
    operator = _overload(library, name)
    if operator is not None:
        return _of_library(operator, _overload(library, f"{name}Grad"), tensors, templates, checked)
    if domain_version not in known_custom_ops.versions(name, domain):
        _unknown(name, domain, domain_version)
    results = [known_custom_ops.call(name, tensors, checked, templates)]
    operand_checks.like_examples(name, results, kinds_of(templates))
    return results


def _overload(library: Any, name: str) -> Any:
    packet = getattr(library, name, None)
    return getattr(packet, "default", packet)


def _of_user(
    key: str,
    tensors: list[torch.Tensor],
    expected: tuple[TensorKind, ...],
    attributes: dict[str, Any],
) -> list[torch.Tensor]:
    forward, backward = _registered[key]
    if backward is None and _needs_gradient(tensors):
        try:
            results = list(forward(tensors, attributes))
        except Exception as error:
            raise _without_gradient(
                key, "forward failed when it was tried with tensors that torch can differentiate"
            ) from error
        operand_checks.like_examples(key, results, expected)
        if not any(outermost(result).requires_grad for result in results):
            raise _without_gradient(key)
        return results
    shapes = json.dumps([[shape, str(dtype).removeprefix("torch.")] for shape, dtype in expected])
    outputs: list[torch.Tensor]
    outputs = _custom_op(tensors, key, json.dumps(attributes, sort_keys=True), shapes)
    return outputs


def _of_library(
    operator: Any,
    gradient: Any,
    tensors: list[torch.Tensor],
    templates: list[torch.Tensor],
    attributes: dict[str, Any],
) -> list[torch.Tensor]:
    outputs = _as_list(_call_library(operator, tensors, attributes, templates))
    operand_checks.like_examples(str(operator), outputs, kinds_of(templates))
    capture = listener()
    if capture is not None and capture.training and _needs_gradient(tensors):
        with capture.paused():
            flows = _has_gradient(operator, tensors, attributes)
        if not flows:
            if gradient is None:
                raise _without_gradient(str(operator))
            _pair(operator, gradient)
            return _of_library(operator, None, tensors, templates, attributes)
    return outputs


def _as_list(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _pair(operator: Any, gradient: Any) -> None:
    """Make ``CubeGrad(x, gradient)`` the gradient of ``Cube(x)``; both take the same attributes."""
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments if not argument.kwarg_only]

    def save(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        given = dict(zip(names, inputs, strict=True))
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        values = {n: v for n, v in given.items() if not isinstance(v, torch.Tensor)}
        ctx.attributes = values | (keyword_only_inputs or {})
        ctx.differentiable = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        found = _call_library(gradient, [*tensors, *gradients], ctx.attributes, tensors)
        results = iter(_as_list(found))
        return tuple(next(results) if flows else None for flows in ctx.differentiable)

    name = operator._schema.name
    torch.library.register_autograd(name, backward, setup_context=save)


def _needs_gradient(tensors: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(outermost(x).requires_grad for x in tensors)


def _without_gradient(key: str, why: str = "") -> Error:
    return Error(
        f"Custom operator {key} has no gradient",
        got=f"a training model that needs a gradient of this operator{why and '; ' + why}",
        fix=(
            "pass backward= to register_custom_op, call torch.library.register_autograd, "
            "define an operator of the same name with the suffix Grad, or detach the inputs "
            "of the operator"
        ),
    )


def _unknown(name: str, domain: str, version: int) -> NoReturn:
    start = _key_of(name, domain, "")
    same = (key.removeprefix(start) for key in _registered if key.startswith(start))
    others = sorted(int(n) for n in same if n.isdecimal()) or known_custom_ops.versions(
        name, domain
    )
    elsewhere = f"; it is registered in version {', '.join(map(str, others))}" if others else ""
    raise Error(
        f"Unknown custom operator '{name}' in domain '{domain}'",
        got=f"version {version}{elsewhere}",
        fix=(
            f"register it: poptorch.register_custom_op('{name}', '{domain}', {version}, forward, "
            "backward)",
            f"or load a library that defines torch.ops.{domain.replace('.', '_')}.{name}: "
            "torch.ops.load_library(path)",
        ),
    )


def _checked(attributes: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in attributes.items():
        if not isinstance(key, str):
            _invalid("All attribute keys must be strings", key)
        if not key.isascii():
            _invalid("key contains non-ASCII characters", key)
        values = list(value) if isinstance(value, list | tuple) else [value]
        for item in values:
            _check_value(key, item)
        if len({type(item) for item in values}) > 1:
            _invalid(f"The elements of attribute '{key}' must all be the same type", value)
        result[key] = values if isinstance(value, list | tuple) else value
    return result


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii():
            _invalid(f"attribute '{key}' contains non-ASCII characters", value)
        return
    if not isinstance(value, float | int):
        title = f"Attribute '{key}': Attribute values must be float, int, str, or a list of these"
        raise InvalidValue(title, got=f"{type(value).__name__} {value!r}", fix=_TABLE)
    kind, low, high = _RANGES[float if isinstance(value, float) else int]
    if not math.isnan(value) and not low <= value <= high:
        raise Error(
            f"{value} is too {'low' if value < low else 'high'} for a {kind} attribute",
            got=f"attribute '{key}'",
            fix=f"use a value from {low} to {high}",
        )


def _invalid(title: str, value: object) -> NoReturn:
    raise InvalidValue(title, got=repr(value), fix=_TABLE)


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Return the attributes that a captured custom operator refers to by a string.

    Args:
        attribute_id_str: a JSON object, or ``"attr:0x0"`` for none.

    Raises:
        ValueError: the argument is not a string, or not one of these two forms.
    """
    if not isinstance(attribute_id_str, str):
        raise InvalidValue(
            "Wrong type for attribute_id_str",
            got=f"{type(attribute_id_str).__name__} {attribute_id_str!r}",
            fix=_ATTRIBUTES_AS_TEXT,
        )
    if re.fullmatch("attr:0x0+", attribute_id_str):
        return {}
    try:
        attributes = json.loads(attribute_id_str)
    except ValueError:
        attributes = None
    if not isinstance(attributes, dict):
        raise InvalidValue(
            "Invalid attribute_id_str",
            got=repr(attribute_id_str),
            fix=_ATTRIBUTES_AS_TEXT,
        )
    return attributes


def _templates(text: str) -> list[TensorKind]:
    return [(tuple(shape), getattr(torch, dtype)) for shape, dtype in json.loads(text)]


def _call_user(
    inputs: list[torch.Tensor], key: str, attributes: str, outputs: str
) -> list[torch.Tensor]:
    forward, _ = _registered[key]
    results = list(forward(_copies(inputs), json.loads(attributes)))
    expected = _templates(outputs)
    operand_checks.like_examples(key, results, expected)
    pairs = zip(results, expected, strict=True)
    return [copied(result.detach().to(dtype)) for result, (_, dtype) in pairs]


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, because the user's function may change its arguments."""
    return [tensor.detach().clone() for tensor in tensors]


def _call_user_backward(*args: Any) -> list[torch.Tensor]:
    *tensors, key, attributes = args
    _, backward = _registered[key]
    assert backward is not None
    given: Any = (*map(_copies, tensors), json.loads(attributes))
    results, inputs = list(backward(*given)), tensors[0]
    if len(results) != len(inputs):
        raise Error(
            f"The gradient of custom operator {key} does not fit its inputs",
            got=f"{len(results)} gradients for {len(inputs)} inputs",
            fix="return one gradient for each input, and None for inputs without a gradient",
        )
    pairs = zip(results, inputs, strict=True)
    return [x.new_zeros(x.shape) if g is None else copied(g.detach().to(x.dtype)) for g, x in pairs]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.key, ctx.attributes, _ = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    inputs, outputs = saved[: ctx.count], saved[ctx.count :]
    results = _custom_op_backward(inputs, outputs, list(gradients), ctx.key, ctx.attributes)
    pairs = zip(results, inputs, strict=True)
    return [g if x.is_floating_point() else None for g, x in pairs], None, None, None


_custom_op_backward = define(
    "custom_op_backward",
    "(Tensor[] inputs, Tensor[] outputs, Tensor[] gradients, str key, str attributes) -> Tensor[]",
    _call_user_backward,
    lambda inputs, *_: [tensor.new_empty(tensor.shape) for tensor in inputs],
)
_custom_op = define(
    "custom_op",
    "(Tensor[] inputs, str key, str attributes, str outputs) -> Tensor[]",
    _call_user,
    lambda inputs, key, attributes, outputs: operand_checks.empty(_templates(outputs), inputs),
    backward=_differentiate,
    setup_context=_remember,
)

# Operators of other libraries. Some of them do not say which shapes their results have.

# For each operator whose result shapes are found by running it: the kinds of results by the kinds
# of arguments.
_seen: dict[Any, dict[tuple[Any, ...], tuple[TensorKind, ...]]] = {}


def _call_library(
    operator: Any,
    inputs: Sequence[torch.Tensor],
    attributes: dict[str, Any],
    templates: Sequence[torch.Tensor],
) -> Any:
    if operator not in _seen:
        try:
            return operator(*inputs, **attributes)
        except private.UnsupportedOperatorException:
            _teach(operator)
    _seen[operator][_signature(operator, inputs, attributes)] = kinds_of(templates)
    return operator(*inputs, **attributes)


def _has_gradient(
    operator: Any, inputs: Sequence[torch.Tensor], attributes: dict[str, Any]
) -> bool:
    """Return whether an operator has a gradient, by trying it on copies of its inputs
    without data.
    """
    probes = [
        whole.detach().new_empty(x.shape).requires_grad_(whole.requires_grad)
        for x, whole in zip(inputs, map(outermost, inputs), strict=True)
    ]
    outputs = _as_list(operator(*probes, **attributes))
    expected = [probe for probe in probes if probe.requires_grad]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch only warns if a C++ operator has no gradient
            gradients = torch.autograd.grad(
                [out for out in outputs if out.requires_grad],
                expected,
                [torch.zeros_like(out) for out in outputs if out.requires_grad],
                allow_unused=True,
            )
    except private.UnsupportedOperatorException as error:
        raise Error(
            f"Operator {error.func} has no function that computes the shapes of its results",
            got=f"the operator is part of the gradient of {operator}",
            fix=(
                "register one: torch.library.register_fake(operator, lambda x, ...: "
                "torch.empty_like(x))"
            ),
        ) from error
    except (RuntimeError, UserWarning):
        return False
    return any(gradient is not None for gradient in gradients)


def _signature(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    names = [a.name for a in operator._schema.arguments if "Tensor" not in str(a.type)]
    given = [a for a in args if not isinstance(a, torch.Tensor)]
    values = {**dict(zip(names, given, strict=False)), **kwargs}
    tensors = kinds_of(a for a in args if isinstance(a, torch.Tensor))
    return tensors, tuple(sorted((name, repr(value)) for name, value in values.items()))


def _teach(operator: Any) -> None:
    seen = _seen.setdefault(operator, {})
    returns = operator._schema.returns
    is_list = len(returns) != 1 or "List" in str(returns[0].type)

    def rule(*args: Any, **kwargs: Any) -> Any:
        results = operand_checks.empty(seen[_signature(operator, args, kwargs)], args)
        return tuple(results) if is_list else results[0]

    torch.library.register_fake(operator, rule)
