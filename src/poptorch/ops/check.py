"""Checks that several operators make of their arguments."""

from __future__ import annotations

from typing import Any

import torch

from .._base.errors import Error


def tensors(returned: Any, title: str) -> list[torch.Tensor]:
    """Return a tensor, or those of a tuple or list, as a list; anything else is an Error."""
    values = [returned] if isinstance(returned, torch.Tensor) else returned
    if isinstance(values, list | tuple) and all(isinstance(v, torch.Tensor) for v in values):
        return list(values)
    raise Error(title, got=repr(returned), fix="return a tensor, or a tuple or list of tensors")


def tensor(value: Any, title: str, fix: str = "pass a torch.Tensor") -> None:
    """Raise an Error with this title unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise Error(title, got=f"{type(value).__name__} {value!r}", fix=fix)
