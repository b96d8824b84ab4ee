"""Define operators of the ``poptorch`` library, which traced graphs call by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "poptorch"


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define a functional operator. Its results share no memory, and ``fake`` also gives strides.

    The rest is as for ``torch.library``. Without ``vmap``, it is called once per sample.
    """
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", kernel)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.register_vmap(qualified, vmap or functools.partial(_one_by_one, operator))
    return operator


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, like a tensor from ``torch.empty`` with this shape."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _one_by_one(operator: Any, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    calls = [
        operator(*(_sample(a, d, at) for a, d in zip(args, in_dims, strict=True)))
        for at in range(info.batch_size)
    ]
    if isinstance(calls[0], torch.Tensor):
        return torch.stack(calls), 0
    results = [torch.stack(same) for same in zip(*calls, strict=True)]
    kind = type(calls[0])
    return kind(results), kind([0] * len(results))


def _sample(argument: Any, dim: Any, at: int) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument if dim is None else argument.select(dim, at)
    if isinstance(argument, list | tuple) and isinstance(dim, list | tuple):
        return [_sample(a, d, at) for a, d in zip(argument, dim, strict=True)]
    return argument
