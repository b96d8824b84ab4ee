"""The keys of ``_Popart`` at compile (spec/options.md section 5.6)."""

import pytest

from poptorch._base.errors import Error
from poptorch.options.popart import KEYS, validate_popart


@pytest.mark.parametrize(
    "kind, value",
    [
        ("bool", True),
        ("int", 1),
        ("float", 1.5),
        ("string", "text"),
        ("list", ["a"]),
        ("list", ("a", "b")),
        ("list", {0, 1}),
        ("dictionary", {"key": "value"}),
        ("dictionary", {"key": True}),
    ],
)
def test_every_key_takes_its_type(kind, value):
    for key in KEYS[kind]:
        validate_popart({key: value})


@pytest.mark.parametrize(
    "key, value, phrase",
    [
        ("nonsense", True, "Unknown bool option: nonsense"),
        ("nonsense", 1, "Unknown int option: nonsense"),
        ("nonsense", 1.0, "Unknown float option: nonsense"),
        ("nonsense", "a", "Unknown string option: nonsense"),
        ("nonsense", [], "Unknown list option: nonsense"),
        ("nonsense", {}, "Unknown dictionary option: nonsense"),
        ("nonsense", None, "Unknown value type"),
        ("dotChecks", [None], "Unknown value type"),
        ("engineOptions", {1: "a"}, "Unknown value type"),
        ("autoRecomputation", True, "Unknown bool option: autoRecomputation"),
        ("outlineThreshold", 10, "Unknown int option: outlineThreshold"),
        ("autoRecomputation", 5, "out of range"),
        ("virtualGraphMode", -1, "out of range"),
        ("hardwareInstrumentations", [0, 2], "out of range"),
        (7, True, "Unknown bool option: 7"),
    ],
)
def test_refused_settings(key, value, phrase):
    with pytest.raises(Error, match=phrase):
        validate_popart({key: value})


def test_the_message_helps():
    with pytest.raises(Error) as caught:
        validate_popart({"outlineTreshold": 1.0})
    assert "outlineThreshold" in str(caught.value)
    with pytest.raises(Error) as caught:
        validate_popart({"outlineThreshold": 1})
    assert "type float" in str(caught.value)


def test_the_log_directory_is_ignored_with_a_warning(caplog):
    validate_popart({"logDir": "x"})
    assert "Options.logDir" in caplog.text


def test_no_key_is_in_two_tables():
    tables = KEYS.values()
    assert sum(map(len, tables)) == len(frozenset().union(*tables))
