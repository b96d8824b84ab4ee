"""``poptorch.Attribute`` (spec/options.md section 11)."""

import pytest

from poptorch.options import Attribute
from poptorch.options import attribute as attributes


@pytest.mark.spec("ops", 25)
def test_scopes_nest_and_restore():
    assert attributes.current.get() == {}
    with Attribute(__outline={"layer": "embedding", "part": "1"}):
        with Attribute(__outline={"layer": "inner"}, other={"a": "b"}):
            assert attributes.current.get() == {
                "__outline": {"layer": "inner", "part": "1"},
                "other": {"a": "b"},
            }
        assert attributes.current.get() == {"__outline": {"layer": "embedding", "part": "1"}}
    assert attributes.current.get() == {}


def test_one_object_can_be_entered_by_hand_and_again():
    scope = Attribute(family={"key": "value"})
    scope.__enter__()
    with scope:
        assert attributes.current.get() == {"family": {"key": "value"}}
    scope.__exit__(None, None, None)
    assert attributes.current.get() == {}


def test_exceptions_restore_too():
    with pytest.raises(KeyError), Attribute(family={"key": "value"}):
        raise KeyError
    assert attributes.current.get() == {}


@pytest.mark.parametrize("value", ["text", {"a": 1}, {1: "a"}, None])
def test_values_are_dictionaries_of_strings(value):
    with pytest.raises(AssertionError):
        Attribute(family=value)
