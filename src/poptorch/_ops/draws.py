"""Find the nodes of a graph that draw at random, their streams, and which draw each node is.

A capture numbers the draws of ``forward`` in their order, and notes the number on the node. A
repeated draw from a restored random state, as in the backward pass of a checkpoint, has the number
of the original draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from .._ir.block_labels import marks
from .._ir.operators import draws, name_of
from . import annotate, random_streams

_DRAW = "poptorch_draw"  # the note on a node
# The note of a dimension order: the node must draw in the memory order of the user's operator.
ORDER = "poptorch_draw_order"

DEVICE = 0  # the device's own stream; other numbers are the user's generators


@dataclass(frozen=True)
class Draw:
    number: int  # among all draws of forward and backward
    stream: int
    operator: str  # the operator that drew, without its overload: ``aten.bernoulli_``
    line: str | None = None  # the user's line that repeated the draw

    def is_of(self, node: fx.Node) -> bool:
        """Return whether this note belongs to the node. Notes are copied to all nodes that are made
        from a node.
        """
        name = name_of(node)
        return name.startswith(self.operator.rstrip("_")) or node.target is random_streams.draw


def marked(draw: Draw) -> contextlib.AbstractContextManager[None]:
    """Note the draw on nodes that are recorded within the block."""
    return annotate.noted(**{_DRAW: draw})


def draw_of(node: fx.Node) -> Draw | None:
    """Return which draw of ``forward`` a node is. Stochastic rounding is not one."""
    draw = marks(node).get(_DRAW)
    return draw if draw is not None and draws(node) and draw.is_of(node) else None


def drawing(graph: fx.Graph) -> Iterator[tuple[fx.Node, Draw]]:
    """Yield the nodes that are draws of ``forward``, in the order of the graph."""
    for node in graph.nodes:
        draw = draw_of(node)
        if draw is not None:
            yield node, draw
