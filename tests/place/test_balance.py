"""Rows of units are cut where the slowest chip is fastest, and never where they may not be."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import poptorch
from poptorch._place.balance import Unit, balance

SIZES = st.integers(0, 9)


@st.composite
def rows(draw: st.DrawFn) -> list[Unit]:
    number = draw(st.integers(1, 7))
    units = []
    for at in range(number):
        begins = None if at and draw(st.booleans()) else f"part{at}"
        units.append(Unit(begins, *(draw(SIZES) for _ in range(4)), joined=draw(st.booleans())))
    return units


def every_way(units: list[Unit], chips: int) -> list[tuple[int, ...]]:
    allowed = [n for n, u in enumerate(units) if n and u.begins is not None and not u.joined]
    return list(itertools.combinations(allowed, chips - 1))


def score(units: list[Unit], cuts: tuple[int, ...], limit: int, pipelined: bool):
    groups = [units[a:b] for a, b in itertools.pairwise([0, *cuts, len(units)])]
    for left, group in zip(reversed(range(len(groups))), groups, strict=True):
        kept = (2 * left + 1 if pipelined else 1) * sum(u.saved_bytes for u in group)
        if kept + sum(u.weight_bytes for u in group) > limit:
            return None
    slowest = max(sum(u.cycles for u in group) for group in groups)
    return slowest, sum(group[0].entering_bytes for group in groups)


# Cut first where that is fastest, after part0, and a byte crosses that need not.
@example([Unit(c + b, int(c), 0, 0, int(b), joined=False) for c, b in ("10", "11", "00", "20")], 3,
         0, False)  # fmt: skip
# What waits on the first of two chips is counted three times, on the last once.
@example([Unit("a", 1, 0, 10), Unit("b", 1, 0, 10)], 2, 30, True)
@given(rows(), st.integers(1, 4), st.integers(0, 60), st.booleans())
def test_no_other_way_is_better(units, chips, limit, pipelined) -> None:
    found = [score(units, cuts, limit, pipelined) for cuts in every_way(units, chips)]
    possible = [each for each in found if each is not None]
    if not possible:
        with pytest.raises(poptorch.Error, match="fits their memory" if found else "cannot be cut"):
            balance(units, chips, limit, pipelined)
        return
    shares = balance(units, chips, limit, pipelined)
    assert [share.ipu for share in shares] == list(range(chips))
    assert sum(share.cycles for share in shares) == sum(unit.cycles for unit in units)
    slowest = max(share.cycles for share in shares)
    assert (slowest, sum(share.entering_bytes for share in shares)) == min(possible)
