"""How a row of layers is cut into parts of equal work."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import poptorch
from poptorch._place.balance import Unit, balance

SIZES = st.integers(0, 9)


@st.composite
def rows(draw: st.DrawFn) -> list[Unit]:
    """Up to seven layers in a row; some belong to the one before, some cannot begin a part."""
    units = []
    for at in range(draw(st.integers(1, 7))):
        belongs_to_the_last = at > 0 and draw(st.booleans())
        begins = None if belongs_to_the_last else f"part{at}"
        sizes = [draw(SIZES) for _ in range(4)]
        units.append(Unit(begins, *sizes, joined=draw(st.booleans())))
    return units


def every_way(units: list[Unit], chips: int) -> list[tuple[int, ...]]:
    """All ways to cut a row into as many parts as there are chips."""
    allowed = [n for n, u in enumerate(units) if n and u.begins is not None and not u.joined]
    return list(itertools.combinations(allowed, chips - 1))


class Score(NamedTuple):
    """The cost to minimise: first the slowest part, then the bytes sent between parts."""

    slowest: int
    crossing: int


def score(units: list[Unit], cuts: tuple[int, ...], limit: int, pipelined: bool) -> Score | None:
    """The score of one way, or None if a part does not fit into the limit of memory.

    In a pipeline, 2k + 1 micro-batches wait on a chip with k chips behind it.
    """
    groups = [units[a:b] for a, b in itertools.pairwise([0, *cuts, len(units)])]
    for behind, group in zip(reversed(range(len(groups))), groups, strict=True):
        waiting = 2 * behind + 1 if pipelined else 1
        saved = waiting * sum(unit.saved_bytes for unit in group)
        if saved + sum(unit.weight_bytes for unit in group) > limit:
            return None
    return Score(
        slowest=max(sum(unit.cycles for unit in group) for group in groups),
        crossing=sum(group[0].entering_bytes for group in groups),
    )


CUT_FIRST_WHERE_IT_IS_FASTEST = [
    Unit(f"part{at}", cycles, 0, 0, entering_bytes, joined=False)
    for at, (cycles, entering_bytes) in enumerate([(1, 0), (1, 1), (0, 0), (2, 0)])
]
"""A greedy cut after the first part makes a byte cross that need not."""


@example(units=CUT_FIRST_WHERE_IT_IS_FASTEST, chips=3, limit=0, pipelined=False)
# What waits on the first of two chips is counted three times, on the last once.
@example(units=[Unit("a", 1, 0, 10), Unit("b", 1, 0, 10)], chips=2, limit=30, pipelined=True)
@given(rows(), st.integers(1, 4), st.integers(0, 60), st.booleans())
def test_no_other_division_is_better(
    units: list[Unit], chips: int, limit: int, pipelined: bool
) -> None:
    ways = every_way(units, chips)
    scores = [score(units, cuts, limit, pipelined) for cuts in ways]
    possible = [each for each in scores if each is not None]
    if not possible:
        with pytest.raises(
            poptorch.Error, match="fits their memory" if ways else "cannot be divided"
        ):
            balance(units, chips, limit, pipelined)
        return

    shares = balance(units, chips, limit, pipelined)

    assert [share.ipu for share in shares] == list(range(chips))
    assert sum(share.cycles for share in shares) == sum(unit.cycles for unit in units)
    found = Score(
        slowest=max(share.cycles for share in shares),
        crossing=sum(share.entering_bytes for share in shares),
    )
    assert found == min(possible)
