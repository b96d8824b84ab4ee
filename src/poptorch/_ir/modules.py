"""Graph modules whose Python code is written when they first run: most are only ever read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from .._base import private


def lazily() -> contextlib.AbstractContextManager[None]:
    """Within the block torch makes its graph modules without their code."""
    try:
        lazy: contextlib.AbstractContextManager[None] = private.use_lazy_graph_module(True)
    except private.Gone as gone:
        private.go_on_without(gone)
        return contextlib.nullcontext()
    return lazy


def graph_module(attributes: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a module that runs a graph.

    Args:
        attributes: by name, or of a module, what the graph reads.
        graph: is the module's own from now on.
    """
    try:
        with lazily():
            kind = private.get_graph_module_cls()
    except private.Gone as gone:
        private.go_on_without(gone)
        kind = fx.GraphModule
    module: fx.GraphModule = kind(attributes, graph)
    return module
