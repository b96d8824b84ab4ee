"""A row of units -> as many groups as there are chips, the fullest as light as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._base.errors import Error
from .units import Unit


@dataclass(frozen=True)
class Share:
    """What one chip gets.

    Attributes:
        ipu: its index.
        begins: path of the module that begins its block; None on a chip that starts the model.
        cycles: of one micro-batch.
        weight_bytes: parameters, gradients, optimizer state, buffers.
        saved_bytes: what is kept for the backward pass, of all micro-batches under way.
        entering_bytes: of one micro-batch, from the chips before.
    """

    ipu: int
    begins: str | None
    cycles: float
    weight_bytes: int
    saved_bytes: int
    entering_bytes: int

    @property
    def bytes(self) -> int:
        """Memory that it needs."""
        return self.weight_bytes + self.saved_bytes


# By where a group ends: what is minimised, of all groups so far, and where the group begins.
Row = dict[int, tuple[float, int]]


def balance(units: Sequence[Unit], chips: int, limit: int, pipelined: bool) -> list[Share]:
    """Cut the row so that the slowest chip is as fast as possible, then so that least crosses.

    Args:
        units: in forward order.
        chips: groups to make.
        limit: bytes that fit one chip.
        pipelined: whether chips keep what the backward pass needs of several micro-batches, as
            in a pipeline; a chip that is d stages before the end keeps 2 d + 1.

    Raises:
        Error: there are fewer places to cut than chips, or nothing fits.
    """
    places = [
        n for n, unit in enumerate(units) if n and unit.begins is not None and not unit.joined
    ]
    if len(places) < chips - 1:
        raise Error(
            f"The model cannot be cut into {chips} parts",
            got=f"a block can begin at {len(places) + 1} places",
            fix=("use fewer IPUs", "put parts of forward into modules of their own"),
        )
    ends = [*places, len(units)]
    kept = [_kept(chip, chips, pipelined) for chip in range(chips)]

    def slower(slowest: float, share: Share) -> float:
        return max(slowest, share.cycles)

    def crossing(crossed: float, share: Share) -> float:
        return crossed + share.entering_bytes

    rows = _rows(units, ends, kept, slower, limit, math.inf)
    if len(units) not in rows[-1]:
        raise _does_not_fit(units, chips, limit)
    # Not in one pass: the fastest first part may cross more than one that is fast enough.
    rows = _rows(units, ends, kept, crossing, limit, rows[-1][len(units)][0])
    starts, end = [], len(units)
    for row in reversed(rows):
        end = row[end][1]
        starts.append(end)
    bounds = [*reversed(starts), len(units)]
    return [
        _share(units, chip, bounds[chip], bounds[chip + 1], kept[chip]) for chip in range(chips)
    ]


def _kept(chip: int, chips: int, pipelined: bool) -> int:
    return 2 * (chips - 1 - chip) + 1 if pipelined else 1


def _rows(
    units: Sequence[Unit],
    ends: Sequence[int],
    kept: Sequence[int],
    joined: Callable[[float, Share], float],
    most_bytes: int,
    most_cycles: float,
) -> list[Row]:
    """For every chip the best way to end its group at each place, among groups that are allowed."""
    rows: list[Row] = []
    before: Row = {0: (0.0, 0)}
    for micro_batches in kept:
        best: Row = {}
        for start, (score, _) in before.items():
            for end in (place for place in ends if place > start):
                share = _share(units, 0, start, end, micro_batches)
                if share.bytes > most_bytes or share.cycles > most_cycles:
                    break
                together = joined(score, share)
                if end not in best or together < best[end][0]:
                    best[end] = (together, start)
        rows.append(best)
        before = best
    return rows


def _share(units: Sequence[Unit], ipu: int, start: int, end: int, kept: int) -> Share:
    part = units[start:end]
    return Share(
        ipu,
        part[0].begins,
        sum(unit.cycles for unit in part),
        sum(unit.weight_bytes for unit in part),
        kept * sum(unit.saved_bytes for unit in part),
        part[0].entering_bytes,
    )


def _does_not_fit(units: Sequence[Unit], chips: int, limit: int) -> Error:
    weights = sum(unit.weight_bytes for unit in units)
    largest = max(units, key=lambda unit: unit.weight_bytes + unit.saved_bytes)
    return Error(
        f"No placement on {chips} IPUs fits their memory",
        got=f"{limit:,} bytes a chip; the model keeps {weights:,} bytes of weights and state, and "
        f"'{largest.begins or '(start)'}' alone needs "
        f"{largest.weight_bytes + largest.saved_bytes:,}",
        fix=(
            "use more IPUs, a smaller micro-batch or half precision",
            "cut large modules into smaller ones: a block begins where a module's forward does",
        ),
    )
