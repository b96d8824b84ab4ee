"""How a chip's memory lies on its tiles: the fullest of them decides whether a program fits.

A weight lies in blocks, as the product that reads it in the forward pass is spread over the tiles,
from the first tile on; its accumulator and its optimizer's state lie like it. Other state is dealt
out tile after tile, 128 bytes at least to each. Source: PopLibs (MIT), poplin ConvOptions
(startTileMultiplier), poputil TileMapping. Code is on every tile, and what comes and goes while the
program runs is taken to be spread evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import fx

from .._ir.graph import Graph
from .._ir.operators import aten, may_view
from .._ir.slots import Kind
from . import products
from .cycles import Chip
from .work import Work

LEAST = 128.0
"""Bytes of a tensor that a tile holds, if it holds any."""


class Tiles:
    """Bytes on every tile of a chip.

    Args:
        count: of the tiles.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._steps = [0.0] * (count + 1)  # where the bytes change from tile to tile
        self._next = 0
        self._everywhere = 0.0

    def lay(self, size: float, share: float) -> None:
        """Add a tensor that lies in blocks from the first tile on.

        Args:
            size: its bytes.
            share: of it that one block is.
        """
        whole = int(1 / share)
        if whole >= self._count:
            self.spread(size)
            return
        self._add(0, whole, size * share)
        self._add(whole, whole + 1, size * (1 - whole * share))

    def deal(self, size: float) -> None:
        """Add a tensor of which tile after tile gets a part."""
        if size >= self._count * LEAST:
            self.spread(size)
            return
        whole, rest = divmod(size, LEAST)
        for part, tiles in ((LEAST, int(whole)), (rest, 1)):
            end = self._next + tiles
            self._add(self._next, min(end, self._count), part)
            self._add(0, max(0, end - self._count), part)
            self._next = end % self._count

    def spread(self, size: float) -> None:
        """Add bytes of which every tile has as many."""
        self._everywhere += size / self._count

    def _add(self, first: int, end: int, size: float) -> None:
        self._steps[first] += size
        self._steps[end] -= size

    def bytes(self) -> list[float]:
        """Return the bytes of every tile."""
        own = itertools.accumulate(self._steps[: self._count])
        return [self._everywhere + max(0.0, size) for size in own]


def blocks(graph: Graph, works: Mapping[fx.Node, Work], chip: Chip) -> dict[str, float]:
    """Return which share of each weight a tile holds that holds a block of it, by its path.

    Args:
        graph: a pass.
        works: what its operators ask for.
        chip: that it runs on.
    """
    weights = {
        node: slot.weight
        for node, slot in zip(graph.placeholders, graph.inputs, strict=True)
        if slot.kind is Kind.PARAM
    }
    made: dict[str, float] = {}
    for node, work in works.items():
        for product in work.products:
            source = _weight(node)
            if product.resident and source in weights:
                c, kind = chip.constants, chip.kind
                spread = products.plan(product, kind, chip.tiles, c, chip.proportion)
                whole = product.groups * product.inner * product.columns * product.itemsize
                made.setdefault(weights[source], spread.block / whole)
    return made


def _weight(node: fx.Node) -> fx.Node | None:
    """The input of the graph that a product's right operand is, looked at in whatever way."""
    source = node.args[2 if node.target in (aten.addmm.default, aten.baddbmm.default) else 1]
    while isinstance(source, fx.Node) and source.op == "call_function":
        if source.target is not aten._to_copy.default and not may_view(source):
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) else None
