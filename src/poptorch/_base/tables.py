"""Format sizes, times and tables as text for terminals, and as HTML for notebooks and files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB")


def size_text(count: float) -> str:
    """Return a number of bytes as readable text: ``1.5 KiB``."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} B"


def time_text(seconds: float) -> str:
    """Return a time as readable text: ``1.5 ms``, ``40 s``."""
    scaled, unit = (seconds, "s") if abs(seconds) >= 10 else (1e3 * seconds, "ms")
    return f"{scaled:,.0f} {unit}" if abs(scaled) >= 100 else f"{round(scaled, 6):.3g} {unit}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


_STYLE = (
    ":root { color-scheme: light dark; }"
    " body { font: 15px/1.5 system-ui, sans-serif; margin: 1em; } h1 { font-size: 1.3em; }"
    " table { display: block; overflow-x: auto; border-spacing: 0; }"  # as wide as a phone
    " td, th { padding: .15em .7em; text-align: left; white-space: nowrap;"
    " border-bottom: 1px solid #8884; }"
)


def html_page(title: str, body: str) -> str:
    title = html.escape(title)
    phones = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{phones}<title>{title}</title><style>{_STYLE}</style>'
    body = f"<h1>{title}</h1>{body}"
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def html_text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


TextPart = str | list[list[str]]  # a line or a table


def text_of(parts: Iterable[TextPart]) -> str:
    return "\n".join(
        line for part in parts for line in ([part] if isinstance(part, str) else table(part))
    )


def html_of(parts: Iterable[TextPart]) -> str:
    return "".join(
        f"<p>{html.escape(part)}</p>" if isinstance(part, str) else html_table(part)
        for part in parts
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [_row("th", head), *(_row("td", row) for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
