"""Indices with symbolic sizes have fewer quotients and remainders, and the same values."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import sympy

from poptorch._base import private
from poptorch._cpu.symbolic_indices import is_symbolic, simplified

FloorDiv, ModularIndexing = private.FloorDiv, private.ModularIndexing
a, b, c, d = sympy.symbols("a b c d", integer=True, nonnegative=True)
s, t = sympy.symbols("s t", integer=True, positive=True)
UNKNOWN = sympy.Symbol("tmp", integer=True)
RANGES = {a: 2, b: 4, c: s, d: 8}

# From an index to its simplest form.
SIMPLER: Mapping[Any, Any] = {
    FloorDiv(8 * b + 32 * c + d, 32 * s): sympy.S.Zero,
    FloorDiv(32 * a * s + 8 * b + 32 * c + d, 32 * s): a,
    ModularIndexing(32 * a * s + 8 * b + 32 * c + d, 32 * s, 2): a,
    ModularIndexing(8 * b + 32 * c + d, 32, s): c,
    ModularIndexing(8 * b + 32 * c + d, 8, 4): b,
    ModularIndexing(8 * b + 32 * c + d, 1, 32): 8 * b + d,
    ModularIndexing(8 * b + ModularIndexing(d, 1, 8), 1, 32 * s): 8 * b + d,
    3 + s * ModularIndexing(b * s + c, s, 4): 3 + s * b,
    ModularIndexing(8 * b * s + 8 * c + d, 8, 2 * s): ModularIndexing(b * s + c, 1, 2 * s),
}
# Of these, some values are as large as the divisor, negative, or not limited.
KEPT = (
    FloorDiv(8 * b + 32 * c + d + 1, 32 * s),
    FloorDiv(c, t),
    FloorDiv(c - b, s),
    FloorDiv(UNKNOWN, 4 * s),
    ModularIndexing(UNKNOWN + c, 1, 2 * s),
    FloorDiv(ModularIndexing(UNKNOWN, 1, 4) + c, 4 * s + 4),
    ModularIndexing(b * c, 1, 2 * s),
)


def values(index: Any) -> list[Any]:
    """Return the values of an index for all values of its variables, and some sizes."""
    found = []
    for size in map(sympy.Integer, (1, 2, 5)):
        counts = [int(sympy.sympify(each).subs(s, size)) for each in RANGES.values()]
        for at in itertools.product(*map(range, counts)):
            numbers = dict(zip(RANGES, map(sympy.Integer, at), strict=True))
            found.append(index.xreplace({**numbers, s: size}))
    return found


@pytest.mark.parametrize("index", SIMPLER, ids=str)
def test_quotients_that_are_known_for_all_sizes_disappear(index: Any) -> None:
    assert simplified(index, RANGES) == SIMPLER[index]


@pytest.mark.parametrize("index", SIMPLER, ids=str)
def test_a_simplified_index_has_the_same_values(index: Any) -> None:
    assert values(simplified(index, RANGES)) == values(index)


@pytest.mark.parametrize("index", KEPT, ids=str)
def test_quotients_that_depend_on_the_sizes_are_kept(index: Any) -> None:
    assert simplified(index, RANGES) == index


def test_numbers_are_left_to_torch() -> None:
    assert not is_symbolic(ModularIndexing(8 * b + d, 1, 32), {b: 4, d: 8})


def test_sizes_in_ranges_or_in_the_index_make_it_symbolic() -> None:
    assert is_symbolic(c, RANGES)
    assert is_symbolic(b * s, {b: 4})
