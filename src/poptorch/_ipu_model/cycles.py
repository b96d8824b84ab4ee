"""What a Work costs on one chip, in cycles: computing, exchange between tiles, synchronisation."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import fx

from .._systems import ChipKind
from . import products
from .composites import work_of
from .constants import DEFAULT, Constants
from .work import NOTHING, Work, tensors


@dataclass(frozen=True)
class Cost:
    """Cycles of one chip, by what they are spent on.

    Attributes:
        compute: tiles compute.
        exchange: tiles of the chip exchange data.
        sync: tiles wait for one another and for the next step.
    """

    compute: float = 0.0
    exchange: float = 0.0
    sync: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.exchange + self.sync

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute + other.compute, self.exchange + other.exchange, self.sync + other.sync
        )

    def times(self, often: float) -> Cost:
        """Return so many of it."""
        return Cost(self.compute * often, self.exchange * often, self.sync * often)


FREE = Cost()


@dataclass(frozen=True)
class Chip:
    """What prices depend on besides the work.

    Attributes:
        kind: of the chip.
        tiles: that compute: those that are not kept for I/O.
        constants: of the model.
        proportion: of a tile's memory that one product may use.
        half_partials: whether matrix products, and convolutions, add up in 16 bits.
    """

    kind: ChipKind
    tiles: int
    constants: Constants = DEFAULT
    proportion: float = DEFAULT.memory_proportion
    half_partials: tuple[bool, bool] = (False, False)

    @property
    def inside(self) -> tuple[object, ...]:
        """All that prices inside the chip depend on."""
        known = self.kind.name, self.tiles, self.proportion, self.half_partials
        return (*known, *self.constants.inside)


@functools.lru_cache(maxsize=16384)
def cost(work: Work, chip: Chip) -> Cost:
    """Return what a work costs on a chip."""
    if work == NOTHING:
        return FREE
    c = chip.constants
    exchange = work.moved / chip.tiles / (c.exchange_bytes * c.exchange_efficiency)
    compute, steps = work.cycles / chip.tiles, work.steps
    if steps:
        compute += c.loop_call * steps
    if work.moved and not work.cycles:  # arrives in pieces and is put together
        compute += work.moved / chip.tiles / c.copy_bytes
    if work.entries:
        compute += _indexed(work, chip)
    for product in work.products:
        spread = products.plan(product, chip.kind, chip.tiles, c, chip.proportion)
        compute, exchange = compute + spread.compute, exchange + spread.exchange
        steps += spread.steps
    total = Cost(compute, exchange, steps * c.step)
    for part, often in work.parts:
        total += cost(part, chip).times(often)
    return total


def _indexed(work: Work, chip: Chip) -> float:
    """Rows that are looked up or added by index: tiles hold pieces of rows and look at all."""
    pieces = max(1, min(chip.tiles, work.row_bytes // 16))
    shares = max(1, chip.tiles // pieces)
    mine = math.ceil(work.entries / shares)
    words = math.ceil(work.row_bytes / pieces / 4)
    if work.scattered:  # 3 + 30 + per offset 12 + 3 per further atom, and offsets of others
        return 33 + mine * (12 + 3 * words) + (work.entries - mine) * 3
    return 6 * 30 + mine * (19 + 2 * words) + (work.entries - mine) * 8 / 6


def temporary_bytes(work: Work, chip: Chip) -> float:
    """Return the bytes that the products of a work need while they run, on all tiles."""
    c, kind, own = chip.constants, chip.kind, chip.proportion
    spread = (products.plan(p, kind, chip.tiles, c, own) for p in work.all_products)
    return max((each.bytes * chip.tiles for each in spread), default=0.0)


def node_cycles(node: fx.Node, kind: ChipKind) -> float:
    """Return the cycles of one node; 0 for what only looks at memory in another way."""
    return cost(work_of(node), Chip(kind, kind.tiles)).total


def value_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value, all of its tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(node))
