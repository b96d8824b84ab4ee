"""Which nodes of a graph draw at random, from which stream, and which of its draws each one is.

A capture numbers the draws of ``forward`` in the order in which they are made, and notes the number
on the node. What is drawn again from a restored random state, as a checkpoint does in the backward
pass, has the number of the first draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from .._ir.blocks import marks
from .._ir.operators import draws, name_of
from . import annotate, streams

_DRAW = "poptorch_draw"  # the note on a node
# The note of an order of dimensions: the node draws what the user's operator drew, in its memory.
ORDER = "poptorch_draw_order"

DEVICE = 0  # the device's own stream; other numbers are generators of the user's


@dataclass(frozen=True)
class Draw:
    number: int  # among all draws of forward and backward
    stream: int
    operator: str  # that drew, without its overload: ``aten.bernoulli_``
    line: str | None = None  # the user's line that drew again

    def is_of(self, node: fx.Node) -> bool:
        """Notes are copied to whatever is made of a node: tell whether this is what draws."""
        name = name_of(node)
        return name.startswith(self.operator.rstrip("_")) or node.target is streams.draw


def marked(draw: Draw) -> contextlib.AbstractContextManager[None]:
    """Within the block nodes that are recorded get the note."""
    return annotate.noted(**{_DRAW: draw})


def draw_of(node: fx.Node) -> Draw | None:
    """Return which draw of ``forward`` a node is; rounding at random is none."""
    draw = marks(node).get(_DRAW)
    return draw if draw is not None and draws(node) and draw.is_of(node) else None


def drawing(graph: fx.Graph) -> Iterator[tuple[fx.Node, Draw]]:
    """Yield the nodes that make the draws of ``forward``, in the order of the graph."""
    for node in graph.nodes:
        draw = draw_of(node)
        if draw is not None:
            yield node, draw
