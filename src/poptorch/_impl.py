"""Provide the names that integrations import from PopTorch's private modules."""

from __future__ import annotations

from torch import nn

from ._session import wrapping


def unwrapModelIfNecessary(model: nn.Module) -> None:
    """Give a wrapped model its own class back while user code pickles it."""
    wrapping.suspend(model)


def rewrapModelIfNecessary(model: nn.Module) -> None:
    """Undo ``unwrapModelIfNecessary``."""
    wrapping.resume(model)
