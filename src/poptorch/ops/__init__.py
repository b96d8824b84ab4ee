"""PopTorch's own operators."""

from .blocks import (
    IPU,
    BeginBlock,
    Block,
    BlockFunction,
    module_repr,
    print,
    removeBlocks,
)
from .losses import identity_loss
from .running import isRunningOnIpu

__all__ = [
    "IPU",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "identity_loss",
    "isRunningOnIpu",
    "module_repr",
    "print",
    "removeBlocks",
]
