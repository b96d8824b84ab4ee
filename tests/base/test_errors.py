"""What errors say, and where."""

import pytest

import poptorch
from poptorch._base.errors import visible


def test_an_error_of_the_library_names_the_line_that_led_to_it() -> None:
    with pytest.raises(poptorch.Error) as caught:
        poptorch.Options().set(nonsense=1)
    assert "Where:  test_errors.py:" in caught.value.message
    assert "poptorch.Options().set(nonsense=1)" in caught.value.message


def test_what_terminals_take_for_commands_is_written_out() -> None:
    text = "a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible(text) == r"a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible("tab\tand line\nand ä€😀") == "tab\tand line\nand ä€😀"
