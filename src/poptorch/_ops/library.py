"""Defining operators of the ``poptorch`` library, which traced graphs call by name."""

from __future__ import annotations

from collections.abc import Callable
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
) -> Any:
    """Define a functional operator.

    Args:
        name: without the namespace.
        schema: for instance ``"(Tensor x) -> Tensor"``; results must not share memory with
            arguments, so that graphs can be reordered and updated in place.
        kernel: computes it, on tensors of every device.
        fake: gives the shape of the result, on tensors without data.
        backward, setup_context: as for ``torch.library.register_autograd``.

    Returns:
        The operator's default overload: call it, and compare ``node.target`` with it.
    """
    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "default", kernel)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
