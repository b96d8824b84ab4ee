"""Text that others wrote, for terminals: nothing in it moves the cursor or hides what is beside it.

Names in a file may hold the characters that terminals take for commands: to clear the screen, to
write elsewhere, to show a line backwards.
"""

from __future__ import annotations

_KEPT = "\t\n"
_CONTROL = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HALVES = range(0xD800, 0xE000)  # of characters: no file takes one alone, JSON does
_ESCAPED = {
    code: ascii(chr(code))[1:-1] for code in (*_CONTROL, *_HALVES) if chr(code) not in _KEPT
}


def visible(text: str) -> str:
    """Return a text with its control characters written out, but for tabs and line breaks."""
    return text.translate(_ESCAPED)
