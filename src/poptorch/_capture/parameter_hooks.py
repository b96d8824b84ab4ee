"""Hooks on the gradients of parameters: they become part of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._base.errors import Error
from .forward import Request
from .lanes import NotVectorisable


def hooks_of(parameter: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Return what is called with the gradients of a parameter, of one micro-batch or the whole."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple(hook for hooks in both for hook in (hooks or {}).values())


def register(request: Request, leaves: Mapping[str, torch.Tensor]) -> None:
    """Put the hooks of the parameters that are trained on the tensors that stand for them."""
    for path in sorted(request.trained & leaves.keys()):
        parameter = request.tensors[path].tensor
        if parameter._post_accumulate_grad_hooks:
            raise Error(
                "A hook that runs after a gradient was accumulated cannot be compiled",
                got=f"register_post_accumulate_grad_hook on '{path}': a compiled program keeps no "
                "grad that a hook could read",
                fix=(
                    "change the gradient of each micro-batch: parameter.register_hook(function)",
                    "remove the hook with the handle that registering it returned",
                ),
            )
        hooks = list((parameter._backward_hooks or {}).values())
        if hooks and request.lanes is not None:
            raise NotVectorisable(f"'{path}' has hooks, which see one micro-batch each")
        for hook in hooks:
            leaves[path].register_hook(hook)  # type: ignore[no-untyped-call]
