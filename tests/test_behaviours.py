"""The page of behaviours is current, and tests cite only what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

import behaviours_page

TABLE = """
[data]
title = "Loading"
behaviours = ["One.", "Two."]
[uncited]
data = { 2 = "there is no second" }
"""
TEST = 'import pytest\n\n\n@pytest.mark.spec("data", %s)\ndef test_it():\n    pass\n'


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(behaviours_page, "ROOT", tmp_path)
    path = tmp_path / "behaviours.toml"
    path.write_text(TABLE)
    return path


def test_the_page_is_current() -> None:
    assert behaviours_page.PAGE.read_text() == behaviours_page.page(), (
        "run: python scripts/behaviours_page.py"
    )


def test_each_behaviour_has_its_tests_or_a_reason(table: Path) -> None:
    (table.parent / "test_data.py").write_text(TEST % 1)
    text = behaviours_page.page(table, table.parent)
    assert "1. One. ([test_it](../test_data.py))\n" in text
    assert "2. Two. *Not shown: there is no second.*\n" in text


@pytest.mark.parametrize(
    "numbers, complaint",
    [
        ("1, 3", r"cited, but not in the table: \[\('data', 3\)\]"),
        ("2", r"neither cited nor explained: \[\('data', 1\)\]"),
        ("1, 2", r"explained, but cited or unknown: \[\('data', 2\)\]"),
    ],
)
def test_what_does_not_fit_is_told(table: Path, numbers: str, complaint: str) -> None:
    (table.parent / "test_data.py").write_text(TEST % numbers)
    with pytest.raises(ValueError, match=complaint):
        behaviours_page.page(table, table.parent)
