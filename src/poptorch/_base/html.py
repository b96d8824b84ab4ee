"""Text as HTML, for notebooks and files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = (
    ":root { color-scheme: light dark; }"
    " body { font: 15px/1.5 system-ui, sans-serif; margin: 1em; }"
    " td, th { padding: .15em .7em; text-align: left; border-bottom: 1px solid #8884; }"
)


def page(title: str, body: str) -> str:
    """Return a page, light or dark as the reader's system is; ``body`` is HTML."""
    title = html.escape(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    body = f"<h1>{title}</h1>{body}"
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{body}</body></html>'


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
