"""``poptorch.Attribute``: scopes that give operations attributes."""

from typing import Any

import pytest

from poptorch.options import Attribute
from poptorch.options.attribute import current

OUTER = {"layer": "embedding", "part": "1"}


def test_without_a_scope_there_are_no_attributes() -> None:
    assert current.get() == {}


def test_an_inner_scope_adds_its_families() -> None:
    with Attribute(__outline=OUTER), Attribute(other={"a": "b"}):
        inside = current.get()

    assert inside == {"__outline": OUTER, "other": {"a": "b"}}


def test_an_inner_scope_replaces_a_family_of_the_outer_one() -> None:
    outer = Attribute(__outline=OUTER)

    with Attribute(__outline={"layer": "inner"}), outer:
        inside = current.get()

    assert inside == {"__outline": OUTER}


@pytest.mark.spec("ops", 25)
def test_an_outer_scope_is_active_again_after_the_inner_one() -> None:
    outer = Attribute(__outline=OUTER)

    with outer:
        with Attribute(__outline={"layer": "inner"}, other={"a": "b"}), outer:
            pass  # a scope may be entered again
        afterwards = current.get()

    assert afterwards == {"__outline": OUTER}


def test_a_scope_ends_also_with_an_error() -> None:
    with pytest.raises(KeyError), Attribute(__outline=OUTER):
        raise KeyError

    assert current.get() == {}


@pytest.mark.parametrize("value", ["text", {"a": 1}, {1: "a"}, None])
def test_values_are_dictionaries_of_strings(value: Any) -> None:
    with pytest.raises(AssertionError):
        Attribute(family=value)
