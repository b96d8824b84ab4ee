"""Keys of ``_Popart.set``: each takes values of one type."""

import itertools
from typing import Any

import pytest

from poptorch import Error
from poptorch.options.popart import KEYS, validate_popart

VALUES: dict[str, list[Any]] = {
    "bool": [True],
    "int": [1],
    "float": [1.5],
    "string": ["text"],
    "list": [["a"], ("a", "b"), {0, 1}],
    "dictionary": [{"key": "value"}, {"key": True}],
}
"""Values of each type."""


def accepted(key: str, value: Any) -> bool:
    try:
        validate_popart({key: value})
    except Error:
        return False
    return True


@pytest.mark.parametrize("kind", VALUES)
def test_every_key_takes_values_of_its_type(kind: str) -> None:
    pairs = itertools.product(KEYS[kind], VALUES[kind])

    refused = [(key, value) for key, value in pairs if not accepted(key, value)]

    assert refused == []


def test_no_key_has_two_types() -> None:
    keys = [key for kind in VALUES for key in KEYS[kind]]

    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize("kind, other", list(itertools.permutations(VALUES, 2)))
def test_no_key_takes_values_of_another_type(kind: str, other: str) -> None:
    for key in KEYS[kind]:
        message = f"(?s)Unknown {other} option: {key}.*takes a value of type {kind}"
        with pytest.raises(Error, match=message):
            validate_popart({key: VALUES[other][0]})


@pytest.mark.parametrize("kind", VALUES)
def test_an_unknown_key_is_refused_by_the_type_of_its_value(kind: str) -> None:
    with pytest.raises(Error, match=f"Unknown {kind} option"):
        validate_popart({"nonsense": VALUES[kind][0]})


@pytest.mark.parametrize(
    "key, value, phrase",
    [
        ("nonsense", None, "Unknown value type"),
        ("dotChecks", [None], "Unknown value type"),
        ("engineOptions", {1: "a"}, "Unknown value type"),
        ("autoRecomputation", 5, "out of range"),
        ("virtualGraphMode", -1, "out of range"),
        ("hardwareInstrumentations", [0, 2], "out of range"),
        (7, True, "Unknown bool option: 7"),
        ("outlineTreshold", 1.0, "did you mean outlineThreshold"),
    ],
)
def test_a_wrong_key_or_value_is_refused(key: Any, value: Any, phrase: str) -> None:
    with pytest.raises(Error, match=phrase):
        validate_popart({key: value})


def test_the_log_directory_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    validate_popart({"logDir": "x"})

    assert "Options.logDir" in caplog.text
