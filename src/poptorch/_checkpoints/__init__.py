"""Save and resume training runs."""

from .checkpoints import Checkpoints

__all__ = ["Checkpoints"]
