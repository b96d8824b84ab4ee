"""What an operator costs on one chip: a rough estimate from shapes alone.

Products count their multiplications at the rate of the matrix unit; everything else counts the
bytes that it moves through the tiles' memory. Rates are per tile: IPU Programmer's
Guide. Estimates of one chip are for weighing operators against one another.
"""

from __future__ import annotations

import torch
from torch import fx

from .._ir.operators import may_view
from .systems import ChipKind

_PRODUCTS_PER_CYCLE = {1: (8.0, 32.0), 2: (16.0, 64.0), 21: (16.0, 64.0)}  # float32, 16 bits
_BYTES_PER_CYCLE = 8.0  # of a tile's memory, read and written by compiled loops
_SYNC = 600.0  # cycles between any two steps of all tiles


def node_cycles(node: fx.Node, kind: ChipKind) -> float:
    """Return the cycles of one node; 0 for what only looks at memory in another way."""
    if node.op != "call_function" or may_view(node):
        return 0.0
    operations = _operations(node)
    if operations:
        single, half = _PRODUCTS_PER_CYCLE[kind.generation]
        rate = half if _itemsize(node) <= 2 else single
        return _SYNC + operations / 2 / rate / kind.tiles
    moved = sum(value_bytes(each) for each in (node, *node.all_input_nodes))
    return _SYNC + moved / _BYTES_PER_CYCLE / kind.tiles


def value_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value, all of its tensors together."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else (value,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _operations(node: fx.Node) -> int:
    """Multiplications and additions of a matrix product or convolution; 0 for the rest."""
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def _itemsize(node: fx.Node) -> int:
    values = [i.meta.get("val") for i in node.all_input_nodes]
    return max((v.element_size() for v in values if isinstance(v, torch.Tensor)), default=4)
