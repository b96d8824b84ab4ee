"""Tables with drawn borders, as the tools that users know print them."""

from __future__ import annotations

from collections.abc import Sequence

Titles = Sequence[tuple[str, int]]


def box(titles: Titles, widths: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    """Return a table below a line of titles.

    Args:
        titles: (text, width) from left to right; together as wide as the columns.
        widths: of the columns; one grows where a cell does not fit.
        rows: the cells, centred; the first row is the head.
    """
    sizes = [max(w, *(len(row[i]) for row in rows)) for i, w in enumerate(widths)]
    spans = [width for _, width in titles]
    spans[-1] += sum(sizes) - sum(widths)
    rule = _line(["-" * size for size in sizes], "+")
    head, *body = [_line(_centred(row, sizes), "|") for row in rows]
    top = [_line(["-" * width for width in spans], "+")]
    top.append(_line(_centred([text for text, _ in titles], spans), "|"))
    return "\n".join([*top, rule, head, rule, *body, *([rule] if body else [])])


def _centred(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        f"{' ' * ((width - len(cell)) // 2)}{cell}".ljust(width)
        for cell, width in zip(cells, widths, strict=True)
    ]


def _line(cells: Sequence[str], edge: str) -> str:
    return f"{edge}{edge.join(cells)}{edge}"
