"""What programs are made of is as recorded: most of what decides about it changes no number."""

import pytest

import decisions

HEAD, *RECORDED = decisions.PAGE.read_text().split("\n\n")
RECORDS = {text.partition("\n")[0]: text.strip() for text in RECORDED}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(HEAD != decisions.HEAD, reason="other torch")]


@pytest.mark.parametrize("name", decisions.CASES)
def test_the_decisions_about_a_program_are_the_recorded_ones(name: str) -> None:
    assert decisions.text(name) == RECORDS[name], "run: python scripts/decisions.py"
