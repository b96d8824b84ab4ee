"""Names that integrations import from PopTorch's private modules."""

from __future__ import annotations

from torch import nn

from . import _session


def unwrapModelIfNecessary(model: nn.Module) -> None:
    """Give a wrapped model its own class back, for as long as it is pickled by hand."""
    _session.suspend(model)


def rewrapModelIfNecessary(model: nn.Module) -> None:
    """Undo ``unwrapModelIfNecessary``."""
    _session.undo_suspend(model)
