"""The text of a value changes if and only if what it holds changes."""

import copy
import enum
import fractions
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poptorch._base.contents import contents_of, is_plain


class Fields:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @functools.cached_property
    def total(self) -> int:
        return len(vars(self))


class Slots:
    __slots__ = ("rate", "unset")

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def closed_over(value: Any) -> Callable[[], Any]:
    return lambda: value


DIFFERENT = {
    "numbers": (1, 1.0),
    "fields": (Fields(rate=0.1), Fields(rate=0.5)),
    "names of fields": (Fields(rate=0.1), Fields(speed=0.1)),
    "fields of fields": (Fields(inner=Fields(rate=0.1)), Fields(inner=Fields(rate=0.5))),
    "classes": (Fields(rate=0.1), Slots(0.1)),
    "slots": (Slots(0.1), Slots(0.5)),
    "lists": ([1], [1, 2]),
    "a list and a tuple": ([1], (1,)),
    "dictionaries": ({"a": 1}, {"b": 1}),
    "sets": ({1, 2}, {1, 3}),
    "values that functions close over": (closed_over(0.1), closed_over(0.5)),
    "codes of functions": (lambda: 1, lambda: 2),
    "defaults of functions": (lambda a=1: a, lambda a=2: a),
    "functions of C": (math.sin, math.cos),
    "methods": (Fields(rate=0.1).__init__, Fields(rate=0.5).__init__),
    "partial functions": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "members of an enum": (Color.RED, Color.BLUE),
    "objects of C": (range(2), range(3)),
    "fractions": (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "paths": (Path("a"), Path("b")),
    "shapes of tensors": (torch.ones(2), torch.ones(3)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_texts_differ_for_different(one: Any, other: Any) -> None:
    assert contents_of(one) != contents_of(other)


@pytest.mark.parametrize(("value", "_"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_copy_has_the_same_text(value: Any, _: Any) -> None:
    assert contents_of(copy.deepcopy(value)) == contents_of(value)


def test_the_text_of_an_object_names_its_fields() -> None:
    assert contents_of(Fields(rate=0.1, steps=[1, 2])) == "Fields(rate=0.1, steps=[1, 2])"


def test_values_that_a_property_caches_do_not_count() -> None:
    value = Fields(rate=0.1)
    before = contents_of(value)

    assert value.total
    assert contents_of(value) == before


def test_an_object_that_holds_itself_has_a_text() -> None:
    value = Fields()
    value.itself = value

    assert contents_of(value).startswith("Fields(itself=Fields(")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        ([1, "a", (torch.ones(1), None)], True),
        ({"a": {1.0}}, True),
        (Slots(0.1), False),
        ([[Slots(0.1)]], False),
        ({"a": len}, False),
    ],
)
def test_values_without_fields_are_plain(value: Any, expected: bool) -> None:
    assert is_plain(value) is expected
