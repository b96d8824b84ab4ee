"""Operators that users register under a name, a domain and a version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._base.errors import Error
from .._ir.slots import narrowed
from .library import copied, define

Attributes = Mapping[str, Any]
Forward = Callable[[list[torch.Tensor], Attributes], Sequence[torch.Tensor]]
Backward = Callable[
    [list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Attributes],
    Sequence[torch.Tensor | None],
]
Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Definition:
    """What a user registered: see ``poptorch.register_custom_op``."""

    name: str
    domain: str
    version: int
    forward: Forward
    backward: Backward | None = None


_registered: dict[str, Definition] = {}


def key_of(name: str, domain: str, version: int) -> str:
    """What programs call a registered operator."""
    return f"{domain}:{name}:{version}"


def register(definition: Definition) -> None:
    """Register or replace an operator."""
    key = key_of(definition.name, definition.domain, definition.version)
    _registered[key] = definition


def find(key: str) -> Definition | None:
    """Return what was registered under exactly this key."""
    return _registered.get(key)


def versions(name: str, domain: str) -> list[int]:
    """Versions that an operator is registered in."""
    same = (d for d in _registered.values() if (d.name, d.domain) == (name, domain))
    return sorted(definition.version for definition in same)


def kinds_of(tensors: Iterable[torch.Tensor]) -> tuple[Kind, ...]:
    """Shape and dtype of each tensor."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def same_kinds(got: Sequence[Kind], wanted: Sequence[Kind]) -> bool:
    """Compare; a 64-bit type is as good as the 32-bit type that it becomes."""
    return _narrowed(got) == _narrowed(wanted)


def _narrowed(kinds: Sequence[Kind]) -> list[Kind]:
    return [(shape, narrowed(dtype)) for shape, dtype in kinds]


def describe(kinds: Sequence[Kind]) -> str:
    """For instance ``float32[4, 2], int32[4]``."""
    return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in kinds) or "nothing"


def to_text(attributes: Attributes) -> str:
    """Attributes as an operator's argument; an int and a float of one value stay different."""
    return json.dumps(dict(attributes), sort_keys=True)


def templates_text(kinds: Sequence[Kind]) -> str:
    """Shapes and dtypes of results as an operator's argument."""
    return json.dumps([[shape, str(dtype).removeprefix("torch.")] for shape, dtype in kinds])


def _templates(text: str) -> list[Kind]:
    return [(tuple(shape), getattr(torch, dtype)) for shape, dtype in json.loads(text)]


def _call(
    inputs: list[torch.Tensor], key: str, attributes: str, outputs: str
) -> list[torch.Tensor]:
    results = list(_registered[key].forward(_copies(inputs), json.loads(attributes)))
    wanted = _templates(outputs)
    got = kinds_of(results)
    if not same_kinds(got, wanted):
        raise Error(
            f"Custom operator {key} returned something else than its example outputs",
            got=f"{describe(got)} instead of {describe(wanted)}",
            fix="let example_outputs have the shapes and dtypes of the real results",
        )
    pairs = zip(results, wanted, strict=True)
    return [copied(result.detach().to(dtype)) for result, (_, dtype) in pairs]


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The user's function may do to its arguments what it likes."""
    return [tensor.detach().clone() for tensor in tensors]


def _fake(
    inputs: list[torch.Tensor], key: str, attributes: str, outputs: str
) -> list[torch.Tensor]:
    device = inputs[0].device if inputs else torch.device("cpu")
    templates = _templates(outputs)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in templates]


def _call_backward(
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    key: str,
    attributes: str,
) -> list[torch.Tensor]:
    backward = _registered[key].backward
    assert backward is not None
    parts = (_copies(inputs), _copies(outputs), _copies(gradients))
    results = list(backward(*parts, json.loads(attributes)))
    if len(results) != len(inputs):
        raise Error(
            f"The gradient of custom operator {key} does not fit its inputs",
            got=f"{len(results)} gradients for {len(inputs)} inputs",
            fix="return one gradient for each input, None where there is none",
        )
    pairs = zip(results, inputs, strict=True)
    return [x.new_zeros(x.shape) if g is None else copied(g.detach().to(x.dtype)) for g, x in pairs]


def _fake_backward(inputs: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in inputs]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.key, ctx.attributes, _ = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    inputs, outputs = saved[: ctx.count], saved[ctx.count :]
    results = custom_op_backward(inputs, outputs, list(gradients), ctx.key, ctx.attributes)
    pairs = zip(results, inputs, strict=True)
    return [g if x.is_floating_point() else None for g, x in pairs], None, None, None


custom_op_backward = define(
    "custom_op_backward",
    "(Tensor[] inputs, Tensor[] outputs, Tensor[] gradients, str key, str attributes) -> Tensor[]",
    _call_backward,
    _fake_backward,
)
custom_op = define(
    "custom_op",
    "(Tensor[] inputs, str key, str attributes, str outputs) -> Tensor[]",
    _call,
    _fake,
    backward=_backward,
    setup_context=_remember,
)
