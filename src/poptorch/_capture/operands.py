"""Products whose operands have different types: torch refuses these when they run, not before."""

from __future__ import annotations

import torch
from torch import fx

from .._base import source
from .._base.errors import Error
from .._ir import blocks

aten = torch.ops.aten

_OPERANDS = {
    aten.mm.default: 2,
    aten.mv.default: 2,
    aten.dot.default: 2,
    aten.addmm.default: 3,
    aten.addmv.default: 3,
}


def refuse_mixed(graph: fx.Graph) -> None:
    """Refuse products of tensors of different types."""
    for node in graph.nodes:
        count = _OPERANDS.get(node.target, 0)
        values = [arg.meta["val"] for arg in node.args[:count] if isinstance(arg, fx.Node)]
        if len({value.dtype for value in values}) > 1:
            line = blocks.line_of(node)
            shown = " and ".join(f"{value.dtype} {list(value.shape)}" for value in values)
            raise Error(
                "A product needs operands of one type",
                got=f"{shown} in {node.target}",
                where=source.describe(*line) if line else None,
                fix=("x.to(weight.dtype) in forward", "inputs of the type of the model's weights"),
            )
