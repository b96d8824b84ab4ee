"""Checks that several operators make of their arguments."""

from __future__ import annotations

from typing import Any

import torch

from .._base.errors import Error


def tensor(value: Any, title: str, fix: str = "pass a torch.Tensor") -> None:
    """Raise an Error with this title unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise Error(title, got=f"{type(value).__name__} {value!r}", fix=fix)
