"""``custom_op``: operators of the user's own. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from .._base.errors import Error, InvalidValue
from .._ops import custom, library_ops
from .._ops.context import listener
from . import check, known

_FLOAT32 = torch.finfo(torch.float32)
_INT64 = torch.iinfo(torch.int64)


def register_custom_op(
    name: str,
    domain: str,
    version: int,
    forward: custom.Forward,
    backward: custom.Backward | None = None,
) -> None:
    """Register an operator for ``custom_op``; registering it again replaces it.

    The functions may do anything, NumPy and other libraries included; a program calls them as they
    are. Source: PopTorch user guide, "PopTorch ops".

    Args:
        name, domain, version: what ``custom_op`` calls it.
        forward: ``forward(inputs, attributes)`` returns a list of tensors.
        backward: ``backward(inputs, outputs, output_gradients, attributes)`` returns one gradient
            or None for each input. Without one, training traces ``forward`` instead, which must
            then consist of differentiable torch operators.
    """
    if not callable(forward) or not (backward is None or callable(backward)):
        raise Error(
            "A custom operator needs functions",
            got=f"forward={forward!r}, backward={backward!r}",
            fix="register_custom_op('Cube', 'custom.ops', 1, forward, backward)",
        )
    custom.register(custom.Definition(name, domain, version, forward, backward))


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Call an operator of the user's own.

    It is looked for among those of ``register_custom_op``, by name, domain and version, and then
    among torch's libraries: ``torch.ops.<domain>.<name>`` with dots in the domain replaced by
    underscores, attributes being passed by keyword. Some that public programs bring as compiled
    plug-ins are known without either: they are listed in ``docs/guide/custom_ops.md``.
    Source: PopTorch user guide, "PopTorch ops".

    Args:
        inputs: a tuple or list of tensors.
        name, domain, domain_version: what the operator was registered as.
        example_outputs: tensors of the shapes and dtypes of the results; their values are ignored,
            and inputs may serve. 64-bit examples stand for 32-bit results.
        attributes: numbers, ASCII strings, or lists of one kind of these.

    Returns:
        The results, always as a list.

    Raises:
        ValueError: an attribute of another kind.
        poptorch.Error: the operator is unknown, returns something else than the examples, or has
            no gradient in a training model that needs one.
    """
    tensors, templates = list(inputs), list(example_outputs)
    for value in (*tensors, *templates):
        check.tensor(value, f"custom_op '{name}' must take torch.tensor inputs and examples")
    checked = _checked(attributes or {})
    key = custom.key_of(name, domain, domain_version)
    definition = custom.find(key)
    if definition is not None:
        return _registered(key, definition, tensors, templates, checked)
    operator = library_ops.find(domain.replace(".", "_"), name)
    if operator is not None:
        return _of_library(operator, tensors, templates, checked)
    plug_in = known.find(name, domain, domain_version)
    if plug_in is None:
        _unknown(name, domain, domain_version)
    results = [plug_in(name, tensors, checked, templates)]
    _compare(name, results, custom.kinds_of(templates))
    return results


def _registered(
    key: str,
    definition: custom.Definition,
    tensors: list[torch.Tensor],
    templates: list[torch.Tensor],
    attributes: dict[str, Any],
) -> list[torch.Tensor]:
    wanted = custom.kinds_of(templates)
    if definition.backward is None and _needs_gradient(tensors):
        try:
            results = list(definition.forward(tensors, attributes))
        except Exception as error:
            raise _without_gradient(key, "forward cannot be looked into") from error
        _compare(key, results, wanted)
        if not any(result.requires_grad for result in results):
            raise _without_gradient(key)
        return results
    outputs: list[torch.Tensor] = custom.custom_op(
        tensors, key, custom.to_text(attributes), custom.templates_text(wanted)
    )
    return outputs


def _of_library(
    operator: Any,
    tensors: list[torch.Tensor],
    templates: list[torch.Tensor],
    attributes: dict[str, Any],
) -> list[torch.Tensor]:
    results = library_ops.call(operator, tensors, attributes, templates)
    outputs = [results] if isinstance(results, torch.Tensor) else list(results)
    _compare(str(operator), outputs, custom.kinds_of(templates))
    capture = listener()
    if capture is not None and capture.training and _needs_gradient(tensors):
        with capture.paused():
            flows = library_ops.has_gradient(operator, tensors, attributes)
        if not flows:
            raise _without_gradient(str(operator))
    return outputs


def _needs_gradient(tensors: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compare(key: str, results: list[torch.Tensor], wanted: Sequence[custom.Kind]) -> None:
    got = custom.kinds_of(results)
    if not custom.same_kinds(got, wanted):
        raise Error(
            f"Custom operator {key} returned something else than its example outputs",
            got=f"{custom.describe(got)} instead of {custom.describe(wanted)}",
            fix="let example_outputs have the shapes and dtypes of the real results",
        )


def _without_gradient(key: str, why: str = "") -> Error:
    return Error(
        f"Custom operator {key} has no gradient",
        got=f"a training model that needs one{why and '; ' + why}",
        fix="pass backward to register_custom_op, or use torch.library.register_autograd, "
        "or detach its inputs",
    )


def _unknown(name: str, domain: str, version: int) -> NoReturn:
    others = custom.versions(name, domain) or known.versions(name, domain)
    elsewhere = f"; it is registered in version {', '.join(map(str, others))}" if others else ""
    namespace = domain.replace(".", "_")
    raise_with = (
        f"poptorch.register_custom_op('{name}', '{domain}', {version}, forward, backward)\n"
        f"or load a library that defines torch.ops.{namespace}.{name}: "
        "torch.ops.load_library(path)"
    )
    raise Error(
        f"Unknown custom operator '{name}' in domain '{domain}'",
        got=f"version {version}{elsewhere}",
        fix=raise_with,
    )


def _checked(attributes: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in attributes.items():
        if not isinstance(key, str):
            _invalid("All attribute keys must be strings", repr(key))
        _check_ascii(key, "key")
        many = isinstance(value, list | tuple)
        for item in value if many else (value,):
            _check_value(key, item)
        if many and len({type(item) for item in value}) > 1:
            _invalid(f"The elements of attribute '{key}' must all be the same type", repr(value))
        result[key] = list(value) if many else value
    return result


def _check_value(key: str, value: Any) -> None:
    if not isinstance(value, float | int | str):
        title = f"Attribute '{key}': Attribute values must be float, int, str, or a list of these"
        _invalid(title, f"{type(value).__name__} {value!r}")
    if isinstance(value, str):
        _check_ascii(value, f"attribute '{key}'")
    elif isinstance(value, float):
        _check_range(key, value, _FLOAT32.min, _FLOAT32.max, "Popart float")
    else:
        _check_range(key, value, _INT64.min, _INT64.max, "64-bit integer")


def _check_range(key: str, value: float, low: float, high: float, kind: str) -> None:
    if math.isnan(value) or low <= value <= high:
        return
    side = "low" if value < low else "high"
    raise Error(
        f"{value} is too {side} for a {kind} attribute",
        got=f"attribute '{key}'",
        fix=f"use a value from {low} to {high}",
    )


def _check_ascii(text: str, where: str) -> None:
    if not text.isascii():
        _invalid(f"{where} contains non-ASCII characters", repr(text))


def _invalid(title: str, got: str) -> None:
    raise InvalidValue(title, got=got, fix="see the table of attributes in the guide")


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Return the attributes behind the text by which a captured custom operator refers to them.

    Source: PopTorch user guide, "PopTorch ops".

    Args:
        attribute_id_str: a JSON object, or ``"attr:0x0"`` for none.

    Raises:
        ValueError: not a string, or neither of these.
    """
    if not isinstance(attribute_id_str, str):
        raise InvalidValue(
            "Wrong type for attribute_id_str",
            got=f"{type(attribute_id_str).__name__} {attribute_id_str!r}",
            fix="pass the string that the operator carries",
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
            fix="pass the string that the operator carries: a JSON object",
        )
    return attributes
