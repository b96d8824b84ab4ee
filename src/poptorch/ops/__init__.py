"""PopTorch's own operators."""

from .debug import ipu_print_tensor, nop
from .hints import (
    recomputationCheckpoint,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .losses import identity_loss
from .multi_conv import MultiConv
from .running import isRunningOnIpu
from .scopes import NameScope

__all__ = [
    "MultiConv",
    "NameScope",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nop",
    "recomputationCheckpoint",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
