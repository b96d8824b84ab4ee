"""Convert a Work to cycles on one chip: computation, exchange between tiles, synchronisation."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

from torch import fx

from .._cost.live_bytes import tensors
from .._ipu_systems import ChipKind
from .._ir.slots import Slot, narrowed
from .product_planner import ChipModel, spread
from .work import NOTHING, Work, work_of


class Cost(NamedTuple):
    """Cycles of one chip, by activity; ``host`` and the later ones are waiting time."""

    compute: float = 0.0
    exchange: float = 0.0  # between tiles, or with other chips
    sync: float = 0.0
    host: float = 0.0  # for data from the host, or for the host to receive data
    streaming: float = 0.0  # for streaming memory
    bubble: float = 0.0  # for other chips
    call: float = 0.0  # for the next call by the host

    @property
    def total(self) -> float:
        return functools.reduce(operator.add, self)

    def plus(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, self, other))

    def times(self, often: float) -> Cost:
        return Cost(*(cycles * often for cycles in self))


FREE = Cost()


@functools.lru_cache(maxsize=16384)
def cost(work: Work, chip: ChipModel) -> Cost:
    if work == NOTHING:
        return FREE
    c = chip.constants
    exchange = work.moved / chip.tiles / (c.exchange_bytes * c.exchange_efficiency)
    compute, steps = work.cycles / chip.tiles, work.steps
    if steps:
        compute += c.loop_call * steps
    if work.moved and not work.cycles:  # it arrives in pieces and is joined
        compute += work.moved / chip.tiles / c.copy_bytes
    if work.entries:
        compute += _indexed(work, chip)
    for each in (spread(product, chip) for product in work.products):
        compute, exchange = compute + each.compute, exchange + each.exchange
        steps += each.steps
    total = Cost(compute, exchange, steps * c.step)
    for part, often in work.parts:
        total = total.plus(cost(part, chip).times(often))
    return total


def _indexed(work: Work, chip: ChipModel) -> float:
    """Return the cycles of rows that are looked up or added by index: tiles have pieces of rows and
    visit all of them.
    """
    pieces = max(1, min(chip.tiles, work.row_bytes // 16))
    shares = max(1, chip.tiles // pieces)
    mine = math.ceil(work.entries / shares)
    words = math.ceil(work.row_bytes / pieces / 4)
    if work.scattered:  # 3 + 30 + per offset 12 + 3 per further atom, and offsets of others
        return 33 + mine * (12 + 3 * words) + (work.entries - mine) * 3
    return 6 * 30 + mine * (19 + 2 * words) + (work.entries - mine) * 8 / 6


def node_cycles(node: fx.Node, kind: ChipKind) -> float:
    return cost(work_of(node), ChipModel(kind, kind.tiles)).total


def slot_bytes(slot: Slot) -> int:
    return math.prod(slot.replica_shape) * narrowed(slot.dtype).itemsize


def node_bytes(node: fx.Node) -> int:
    return sum(each.numel() * narrowed(each.dtype).itemsize for each in tensors(node))
