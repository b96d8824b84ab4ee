"""Turn a module and an example into the graph of one micro-batch: trace, loss, backward, buffer
updates.
"""

from .explain import Explanation, capture, explain, search
from .forward import OverwriteContextManager, Request
from .losses import LOSS_FUNCTIONS
from .micro_batch import Decision, Micro, hooks_of, report_narrowed
from .purity import LONE_WRITES, WHOLE_WRITES
from .python_state import ModuleAttribute, PythonState
from .recompute import checkpoints, recomputed, with_fewer_checkpoints
from .recorded_again import REPEATED_CALLS
from .replaced_tensors import TENSOR_HOLDERS, ModelTensor, refuse_uninitialized, tensors_of
from .trace import forgetting_sources, untraced, without_data

SHORTCUTS = (REPEATED_CALLS, LONE_WRITES, WHOLE_WRITES)
"""Steps of a capture that only save time, so each of them can be left out."""

__all__ = [
    "LOSS_FUNCTIONS",
    "SHORTCUTS",
    "TENSOR_HOLDERS",
    "Decision",
    "Explanation",
    "Micro",
    "ModelTensor",
    "ModuleAttribute",
    "OverwriteContextManager",
    "PythonState",
    "Request",
    "capture",
    "checkpoints",
    "explain",
    "forgetting_sources",
    "hooks_of",
    "recomputed",
    "refuse_uninitialized",
    "report_narrowed",
    "search",
    "tensors_of",
    "untraced",
    "with_fewer_checkpoints",
    "without_data",
]
