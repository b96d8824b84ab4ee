"""Conditions on sizes: when they hold, and the form in which they are stored."""

import json

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from poptorch._ir.conditions import Conditions, symbol

s0, s1 = symbol("s0"), symbol("s1")
EXPRESSIONS = (
    sympy.Le(16 * s0, 4096),
    sympy.Ne(s0, s1),
    sympy.Eq(Mod(s0, 8), 0),
    sympy.Gt(FloorDiv(s0, 2) + 1, s1 - 3),
    sympy.Lt(s0 * sympy.Rational(1, 2), 9),
    sympy.And(s0 > 3, sympy.Or(s1 > 4, s0 > 9)),
)


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_conditions_that_were_stored_are_the_same(expression: sympy.Basic) -> None:
    conditions = Conditions((expression,))

    stored = json.loads(json.dumps(conditions.to_json()))

    assert Conditions.from_json(stored) == conditions


def test_stored_conditions_name_expressions_only() -> None:
    with pytest.raises(TypeError, match="no expression sympify"):
        Conditions.from_json([["sympy", "sympify", "s0"]])


def test_conditions_without_those_of_another_are_what_it_adds() -> None:
    graph, code = Conditions((s0 < 40,)), Conditions((s0 < 40, s1 > 8))

    assert code.without(graph) == Conditions((s1 > 8,))


def test_the_truth_of_each_condition_is_known_for_some_sizes() -> None:
    assert Conditions((s0 < 40, s0 > 8)).truths({"s0": 5}) == (True, False)


def test_sizes_for_which_a_condition_divides_by_zero_do_not_satisfy_it() -> None:
    conditions = Conditions((sympy.Eq(Mod(s1, s0 - 2), 0),))

    assert conditions.hold({"s0": 4, "s1": 6})
    assert not conditions.hold({"s0": 2, "s1": 6})


def test_a_condition_for_one_value_of_an_expression_names_the_expression() -> None:
    half = FloorDiv(s0, 2)
    conditions = Conditions((sympy.Eq(Mod(s0, 8), 0), sympy.Eq(s0, s1), sympy.Eq(half, 33)))

    assert conditions.fixed() == half


def test_a_remainder_is_the_same_for_many_sizes() -> None:
    assert Conditions((sympy.Eq(Mod(s0, 8), 0), sympy.Eq(s0, s1))).fixed() is None
