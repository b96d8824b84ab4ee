"""Checks that several operators make of their arguments."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .._base import source
from .._base.errors import Error


def tensor(value: Any, title: str, fix: str = "pass a torch.Tensor") -> None:
    """Raise an Error with this title unless the value is a tensor."""
    if not isinstance(value, torch.Tensor):
        refuse(Error, title, got=f"{type(value).__name__} {value!r}", fix=fix)


def refuse(cls: type[Error], title: str, *, got: str, fix: str) -> NoReturn:
    """Raise an error that names the user's line."""
    raise cls(title, got=got, where=source.calling_line(), fix=fix)
