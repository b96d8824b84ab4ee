"""Expressions that are the same size for all sizes, and those that are not."""

from typing import Any

import pytest
import sympy

from poptorch._base import private
from poptorch._ir.conditions import ALWAYS, Conditions, symbol
from poptorch._ir.equal_sizes import always_equal

s, t = symbol("s0"), symbol("s1")
FloorDiv = private.FloorDiv


def rounded_up(size: Any) -> Any:
    return 4 * FloorDiv(size + 3, 4)


EQUAL = {
    "padding to a multiple": (rounded_up(s), s + 3 - (s + 3 - rounded_up(s))),
    "windows of a padded length": (
        rounded_up(s),
        FloorDiv(rounded_up(s), FloorDiv(rounded_up(s), 4)) * FloorDiv(s + 3, 4),
    ),
    "two sizes": (rounded_up(s) * t, t * 4 * FloorDiv(s + 3, 4)),
}
DIFFERENT = {
    "a size and a number": (s, 5),
    "two sizes": (s, t),
    "a part": (s, 2 * FloorDiv(s, 2)),
    "a size and a limit that is far away": (s, private.Max(s, 5000)),
    "a size that is rounded to many": (s, 1000 * FloorDiv(s + 999, 1000)),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_expressions_that_are_equal_for_all_sizes(pair: tuple[Any, Any]) -> None:
    assert always_equal(*pair, ALWAYS)


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_expressions_that_differ_for_some_sizes(pair: tuple[Any, Any]) -> None:
    assert not always_equal(*pair, ALWAYS)


def test_sizes_that_do_not_satisfy_conditions_do_not_count() -> None:
    even = Conditions((sympy.Eq(s, 2 * FloorDiv(s, 2)),))

    assert always_equal(s, 2 * FloorDiv(s, 2), even)


def test_expressions_are_not_compared_at_few_sizes() -> None:
    few = Conditions((s <= 12,))

    assert not always_equal(s, private.Max(s, 2), few)
