"""Find values that a program rounds to half precision and continues to use in float32.

By default, torch's compiler leaves out the rounding if one kernel computes both conversions. A
difference to the rounded value, as in compensated summation, is then zero.
"""

from __future__ import annotations

import torch
from torch import fx

from .._ir.operators import RESHAPES

aten = torch.ops.aten

_MOVES = RESHAPES | {
    aten.clone.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
}
_HALVES = {torch.float16, torch.bfloat16}


def rounds_to_half(graph: fx.Graph) -> bool:
    """Return whether a conversion from float32 to half precision is followed by its reverse."""
    rounded: set[fx.Node] = set()
    for node in graph.nodes:
        if not node.all_input_nodes or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        source = node.all_input_nodes[0]
        if node.target is aten._to_copy.default:
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if before == torch.float32 and after in _HALVES:
                rounded.add(node)
            elif after == torch.float32 and source in rounded:
                return True
        elif node.target in _MOVES and source in rounded:
            rounded.add(node)
    return False
