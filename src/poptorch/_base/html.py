"""Text as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text_block(text: str) -> str:
    """Return a text with its line breaks and columns kept."""
    return f"<pre>{html.escape(text)}</pre>"


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines, each as a paragraph."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first is the head."""
    head, *body = rows
    lines = [_row("th", head), *(_row("td", row) for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
