"""Calling operators of other libraries by name, those that never told torch their shapes too."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .._base import private
from .._base.errors import Error
from .custom import Kind, kinds_of

_seen: dict[tuple[Any, ...], tuple[tuple[Kind, ...], bool]] = {}

_taught: set[str] = set()  # operators that take their shapes from what was seen


def find(namespace: str, name: str) -> Any:
    """Return the operator, or None."""
    library = getattr(torch.ops, namespace)
    packet = getattr(library, name, None)
    return getattr(packet, "default", packet)


def call(
    operator: Any,
    inputs: Sequence[torch.Tensor],
    attributes: dict[str, Any],
    templates: Sequence[torch.Tensor],
) -> Any:
    """Call an operator; one that cannot tell its shapes takes those of the templates."""
    if str(operator) not in _taught:
        try:
            return operator(*inputs, **attributes)
        except private.UnsupportedOperatorException:
            _teach(operator)
    _seen[_signature(operator, inputs, attributes)] = kinds_of(templates), _is_list(operator)
    return operator(*inputs, **attributes)


def has_gradient(operator: Any, inputs: Sequence[torch.Tensor], attributes: dict[str, Any]) -> bool:
    """Try whether gradients flow through an operator, on copies of its inputs without data."""
    probes = [
        torch.empty_like(x).requires_grad_(x.is_floating_point() and x.requires_grad)
        for x in inputs
    ]
    results = operator(*probes, **attributes)
    outputs = [results] if isinstance(results, torch.Tensor) else list(results)
    wanted = [probe for probe in probes if probe.requires_grad]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch only warns where a C++ operator has none
            gradients = torch.autograd.grad(
                [out for out in outputs if out.requires_grad],
                wanted,
                [torch.zeros_like(out) for out in outputs if out.requires_grad],
                allow_unused=True,
            )
    except private.UnsupportedOperatorException as error:
        raise Error(
            f"Operator {error.func} does not say what shapes it returns",
            got=f"it is part of the gradient of {operator}",
            fix="torch.library.register_fake(operator, lambda x, ...: torch.empty_like(x))",
        ) from error
    except (RuntimeError, UserWarning):
        return False
    return any(gradient is not None for gradient in gradients)


def _is_list(operator: Any) -> bool:
    returns = operator._schema.returns
    return len(returns) != 1 or "List" in str(returns[0].type)


def _signature(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the shapes of results depend on."""
    tensors = kinds_of(a for a in args if isinstance(a, torch.Tensor))
    rest = [repr(a) for a in args if not isinstance(a, torch.Tensor)]
    values = {**dict(zip(_attribute_names(operator), rest, strict=False))}
    values |= {name: repr(value) for name, value in kwargs.items()}
    return str(operator), tensors, tuple(sorted(values.items()))


def _attribute_names(operator: Any) -> list[str]:
    return [a.name for a in operator._schema.arguments if "Tensor" not in str(a.type)]


def _teach(operator: Any) -> None:
    """Give an operator a shape rule: what was seen for such arguments before."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        kinds, is_list = _seen[_signature(operator, args, kwargs)]
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
        results = tuple(torch.empty(shape, dtype=d, device=device) for shape, d in kinds)
        return results if is_list else results[0]

    torch.library.register_fake(operator, rule)
    _taught.add(str(operator))
