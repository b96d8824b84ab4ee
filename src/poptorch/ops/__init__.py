"""Provide PopTorch's operators. The source is PopTorch's user guide, "PopTorch ops", unless stated
otherwise.
"""

from .._ops.autocast import autocast
from .blocks import (
    IPU,
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    NameScope,
    module_repr,
    print,
    removeBlocks,
)
from .control import cond, for_loop
from .custom import accessAttributes, custom_op, register_custom_op
from .debug import getIpuTensorId, ipu_print_tensor, isRunningOnIpu, nop
from .decoder import ctc_beam_search_decoder
from .hints import (
    identity_loss,
    recomputationCheckpoint,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .host import CPU
from .matmul import serializedMatMul
from .multi_conv import MultiConv
from .points import fps, nearest
from .slicing import dynamic_slice, dynamic_update

__all__ = [
    "CPU", "IPU", "BeginBlock", "Block", "BlockFunction", "LegacyBeginBlockFn", "MultiConv",
    "NameScope", "accessAttributes", "autocast", "cond", "ctc_beam_search_decoder", "custom_op",
    "dynamic_slice", "dynamic_update", "for_loop", "fps", "getIpuTensorId", "identity_loss",
    "ipu_print_tensor", "isRunningOnIpu", "module_repr", "nearest", "nop", "print",
    "recomputationCheckpoint", "register_custom_op", "removeBlocks", "serializedMatMul",
    "set_available_memory", "set_overlap_for_input", "set_overlap_for_output",
]  # fmt: skip
