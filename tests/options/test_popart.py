"""The keys of ``_Popart`` at compile (spec/options.md section 5.6)."""

import pytest

from poptorch._base.errors import Error
from poptorch.options.popart import KEYS, validate_popart

GOOD = {
    "bool": [True], "int": [1], "float": [1.5], "string": ["text"],
    "list": [["a"], ("a", "b"), {0, 1}], "dictionary": [{"key": "value"}, {"key": True}],
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_every_key_takes_its_type_and_no_other(kind: str) -> None:
    for key in KEYS[kind]:
        for value in GOOD[kind]:
            validate_popart({key: value})
        for other in GOOD.keys() - {kind}:
            assert key not in KEYS[other]
            said = f"(?s)Unknown {other} option: {key}.*takes a value of type {kind}"
            with pytest.raises(Error, match=said):
                validate_popart({key: GOOD[other][0]})


@pytest.mark.parametrize("key, value, phrase", [
    *(("nonsense", values[0], f"Unknown {kind} option") for kind, values in GOOD.items()),
    ("nonsense", None, "Unknown value type"), ("dotChecks", [None], "Unknown value type"),
    ("engineOptions", {1: "a"}, "Unknown value type"),
    ("autoRecomputation", 5, "out of range"), ("virtualGraphMode", -1, "out of range"),
    ("hardwareInstrumentations", [0, 2], "out of range"),
    (7, True, "Unknown bool option: 7"),
    ("outlineTreshold", 1.0, "did you mean outlineThreshold"),
])  # fmt: skip
def test_refused_settings(key, value, phrase: str) -> None:
    with pytest.raises(Error, match=phrase):
        validate_popart({key: value})


def test_the_log_directory_is_ignored_with_a_warning(caplog) -> None:
    validate_popart({"logDir": "x"})
    assert "Options.logDir" in caplog.text
