"""Text of others, for terminals."""

from __future__ import annotations

from poptorch._base.visible import visible


def test_what_terminals_take_for_commands_is_written_out() -> None:
    text = "a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible(text) == r"a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible("tab\tand line\nand ä€😀") == "tab\tand line\nand ä€😀"
