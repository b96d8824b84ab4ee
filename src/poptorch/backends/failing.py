"""Find the operator that failed while a program ran, and the user's line that called it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import fx

from .._base import interrupts, source
from .._base.errors import Error, OperatorError, OperatorIndexError
from .._ir.block_labels import line_of
from .._ir.graph import Graph
from .._ops.effects import is_effect

_TRAILER = re.compile("\n+(?:Exception raised from|While executing)")  # torch's internals


def explained(error: Exception, graph: Graph, arguments: Sequence[Any]) -> Exception:
    """Return the exception to raise for a graph that failed: our explanation of torch's error, or
    the user's exception.

    Compiled code does not say which operator failed, so the graph is interpreted to find it.
    """
    if isinstance(error, Error) or is_users(error):
        return error
    found, node, nodes = error, _failed(error), graph.module.graph.nodes
    if node is None and not any(map(is_effect, nodes)):
        try:
            fx.Interpreter(graph.module).run(*arguments)
        except Exception as repeated_error:
            if (node := _failed(repeated_error)) is not None:
                found = repeated_error
    line = line_of(node) if node is not None else None
    operator = f"{node.target}: " if node is not None else ""
    kind = OperatorIndexError if isinstance(found, IndexError) else OperatorError
    return kind(
        "An operator of the program failed",
        got=operator + _TRAILER.split(str(found), maxsplit=1)[0].strip(),
        where=source.describe(*line) if line is not None else None,
        fix=(
            "print the operands of this operator: poptorch.ipu_print_tensor",
            "or call the model without the wrapper to see PyTorch's own traceback",
        ),
    )


def is_users(error: Exception) -> bool:
    """Return whether the user's code raised the error, for example in a function that the program
    calls, or in a signal's handler.
    """
    return interrupts.is_from_handler(error) or any(
        source.is_user_file(frame.f_code.co_filename)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith("torch.")  # generated code
    )


def refused_memory(error: Exception) -> bool:
    causes = (error, error.__cause__)
    return any(isinstance(e, MemoryError) or "allocate memory" in str(e) for e in causes)


def _failed(error: Exception) -> fx.Node | None:
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    return next((node for place in frames if (node := _running(*place))), None)


def _running(frame: FrameType, line: int) -> fx.Node | None:
    """Return the node that a frame runs, in a graph's code or in an interpreter."""
    if isinstance(node := frame.f_locals.get("n"), fx.Node):
        return node
    module = frame.f_locals.get("self")
    if not (isinstance(module, fx.GraphModule) and frame.f_code.co_filename.startswith("<eval")):
        return None
    lines = getattr(module, "_lineno_map", None) or {}
    at = lines.get(line - getattr(module, "_prologue_start", 0))
    return None if at is None else list(module.graph.nodes)[at]
