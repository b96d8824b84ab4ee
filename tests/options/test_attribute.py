"""``poptorch.Attribute`` (spec/options.md section 11)."""

import pytest

from poptorch.options import Attribute
from poptorch.options.attribute import current


@pytest.mark.spec("ops", 25)
def test_scopes_nest_and_restore() -> None:
    outer = Attribute(__outline={"layer": "embedding", "part": "1"})
    with outer:
        with Attribute(__outline={"layer": "inner"}, other={"a": "b"}), outer:
            assert current.get() == {"__outline": {"layer": "embedding", "part": "1"},
                                     "other": {"a": "b"}}  # fmt: skip
        assert current.get() == {"__outline": {"layer": "embedding", "part": "1"}}
    assert current.get() == {}
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert current.get() == {}


@pytest.mark.parametrize("value", ["text", {"a": 1}, {1: "a"}, None])
def test_values_are_dictionaries_of_strings(value) -> None:
    with pytest.raises(AssertionError):
        Attribute(family=value)
