"""PopTorch's own operators."""

from .losses import identity_loss
from .running import isRunningOnIpu

__all__ = ["identity_loss", "isRunningOnIpu"]
