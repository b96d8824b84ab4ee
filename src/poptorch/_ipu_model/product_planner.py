"""Decide how a matrix product is spread over tiles, like the planner of PopLibs (MIT)."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from .._ipu_systems import ChipKind
from .constants import DEFAULT, Constants
from .work import Product


@dataclass(frozen=True)
class ChipModel:
    kind: ChipKind
    tiles: int  # tiles that compute, without those reserved for I/O
    constants: Constants = DEFAULT
    proportion: float = DEFAULT.memory_proportion  # share of a tile's memory
    half_partials: tuple[bool, bool] = (False, False)  # for matrix products, for convolutions

    @property
    def inside(self) -> tuple[object, ...]:
        known = self.kind.name, self.tiles, self.proportion, self.half_partials
        return (*known, *self.constants.inside)


class Spread(NamedTuple):
    """One way to spread a product. Cycles and bytes are those of a tile."""

    compute: float
    exchange: float
    steps: int  # supersteps
    bytes: float  # without stored operands and the result
    block: float  # bytes of the operand with the columns that are stored on a tile

    @property
    def cycles(self) -> float:
        return self.compute + self.exchange


class _MatrixUnit(NamedTuple):
    """A tile's matrix unit for one data type: the block of weights that it can load."""

    inner: int
    columns: int
    row_cycles: float  # for one row of such a block


def _unit(kind: ChipKind, itemsize: int, half_partials: bool) -> _MatrixUnit:
    if itemsize == 1 and kind.generation == 21:
        return _MatrixUnit(32, 16, 4)
    if itemsize <= 2:
        return _MatrixUnit(16, 16 if half_partials and kind.generation > 1 else 8, 4)
    return _MatrixUnit(8, 16 if kind.generation > 1 else 8, 8)


def peak_macs(kind: ChipKind, itemsize: int, half_partials: bool) -> float:
    unit = _unit(kind, itemsize, half_partials)
    return unit.inner * unit.columns / unit.row_cycles


_LEAST_SHARE = 0.01


@functools.lru_cache(maxsize=4096)
def spread(product: Product, chip: ChipModel) -> Spread:
    """Return the fastest way to spread a product, with the memory of the way that needs least."""
    unit, tiles = _unit(chip.kind, product.itemsize, product.half_partials), chip.tiles
    tried: list[Spread] = []
    for groups in _groups(product.groups, tiles):
        rest = tiles // math.ceil(product.groups / groups)
        for rows, inner in itertools.product(
            _parts(product.rows, rest), _parts(math.ceil(product.inner / unit.inner), rest)
        ):
            if rows * inner > rest:
                continue
            most = rest // (rows * inner)
            columns = math.ceil(product.columns / unit.columns)
            for parts in {min(columns, most), min(columns, max(1, most // 2))}:
                cut = rows, inner, parts
                tried.append(_priced(product, unit, groups, cut, chip))
    # The fastest way changes with the size, so its memory jumps. The smallest memory grows
    # steadily.
    least = min(one.bytes for one in tried)
    fastest = min(tried, key=lambda one: one.cycles + one.steps * chip.constants.step)
    return fastest._replace(bytes=least)


def _groups(count: int, tiles: int) -> list[int]:
    """Return how many groups to give to a tile: one or few, so that all tiles are used."""
    least = math.ceil(count / tiles)
    return sorted({min(count, least * times) for times in ((1, 2, 4) if count > 16 else (1,))})


def _parts(size: int, tiles: int) -> list[int]:
    most = min(size, tiles)
    tried = {1, most}
    power = 1
    while power <= most:
        tried |= {power, min(most, power + power // 2)}
        power *= 2
    return sorted(tried)


def _priced(
    product: Product, unit: _MatrixUnit, groups: int, parts: tuple[int, int, int], chip: ChipModel
) -> Spread:
    c, kind = chip.constants, chip.kind
    proportion = max(product.share or chip.proportion, _LEAST_SHARE)
    rows, inner = math.ceil(product.rows / parts[0]), math.ceil(product.inner / parts[1])
    columns, size = math.ceil(product.columns / parts[2]), product.itemsize
    partial = 2 if product.half_partials else 4
    sums = rows * columns * groups
    left = groups * _left_elements(product, rows, inner) * size
    right = groups * inner * columns * size
    received = _received(
        (left, parts[2]), (right * ((1 - 1 / parts[0]) if product.resident else 1), parts[0]), kind
    )
    compute = groups * min(
        _on_unit(unit, rows, inner, columns, size, c),
        rows * inner * columns / (c.vector_products * (1 if size <= 2 else 0.25)),
    )
    steps = 1
    if parts[1] > 1:  # partial sums of one result are on several tiles
        received += sums * partial
        compute += sums * 1.0 + c.loop_call
        steps += 1
    if partial > size:
        compute += sums / parts[1] * 0.75
    needed = left + right + sums * partial
    serial = max(1, math.ceil(needed / (proportion * kind.tile_bytes)))
    # A result that one tile computes is not temporary, and neither is one that is stored where it
    # is needed.
    result = sums * partial if parts[1] == 1 and partial <= size else 0
    extra = needed - result - (right / parts[0] if product.resident else 0)
    exchange = received / (c.exchange_bytes * c.exchange_efficiency)
    block = right / parts[0]
    return Spread(compute + c.product_call, exchange, steps * serial + 1, extra / serial, block)


def _received(left: tuple[float, int], right: tuple[float, int], kind: ChipKind) -> float:
    """Return the bytes of operands to exchange. Neighbouring tiles can receive the same data at
    twice the rate.
    """
    shared = max((size for size, readers in (left, right) if readers > 1), default=0.0)
    return left[0] + right[0] - (shared / 2 if kind.generation > 1 else 0.0)


def _on_unit(
    unit: _MatrixUnit, rows: int, inner: int, columns: int, size: int, c: Constants
) -> float:
    blocks = math.ceil(inner / unit.inner) * math.ceil(columns / unit.columns)
    load = unit.inner * unit.columns * size / c.weight_load_bytes
    return blocks * (load + c.product_block + unit.row_cycles * max(rows, c.workers))


def _left_elements(product: Product, rows: int, inner: int) -> float:
    """Return the elements of the left operand that a tile reads. A convolution reads neighbours
    only once.
    """
    if product.taps == 1:
        return rows * inner
    whole = product.left / product.groups * rows / product.rows
    side = math.sqrt(max(1.0, rows))
    halo = ((side + math.sqrt(product.taps) - 1) / side) ** 2
    return min(rows * inner, whole * halo * min(1.0, inner * product.taps / product.inner))
