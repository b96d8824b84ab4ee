"""Lay out statements as lines, and break long ones as ruff's formatter does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

WIDTH = 100
_LONG_NAME = re.compile(r'"[^"]*",?')  # a string cannot be broken


def laid_out(text: str, indent: int, comment: str = "") -> list[str]:
    """Return a statement as lines, with its comment at the end, or above it if there is no room."""
    behind = f"{' ' * indent}{text}  # {comment}"
    if comment and len(behind) <= WIDTH:
        return [behind]
    before = [f"{' ' * indent}# {comment}"] if comment else []
    return [*before, *_lines(text, indent)]


def _lines(text: str, indent: int) -> Iterator[str]:
    pad, (masked, depths) = " " * indent, _depths(text)
    if indent + len(text) <= WIDTH or _LONG_NAME.fullmatch(text):
        yield pad + text
        return
    opening = [at for at, c in enumerate(masked) if c in "([{" and depths[at] == 1]
    before, sign, value = text.partition(" = ")
    fitting = [at for at in opening if indent + at < WIDTH and masked[at + 1] not in ")]}"]
    if text.startswith("return "):
        yield from _spread(f"{pad}return (", _parts(text[7:], ", "), ")")
        return
    if sign and ", " in before and indent + len(before) + value.find("(") > WIDTH - 5:
        *head, last = _spread(f"{pad}(", before.split(", "), ") = ")
        first, *rest = _lines(f"_ = {value}", indent)
        yield from (*head, last + first.partition(" = ")[2], *rest)
        return
    if (sign and _is_bracketed(value)) or not fitting:
        yield from (f"{pad}{before} = (", f"{pad}    {value}", f"{pad})")
        return
    start = fitting[-1]
    end = depths.index(0, start)
    inside = text[start + 1 : end]
    yield pad + text[: start + 1]
    loops, parts = _parts(inside, " for "), _parts(inside, ", ")
    # A trailing comma would turn a key into a tuple.
    is_key = len(parts) == len(loops) == 1 and text[start] == "["
    if indent + 4 + len(inside) <= WIDTH or is_key:
        yield f"{pad}    {inside}"
    elif len(loops) > 1:
        yield from _lines(loops[0], indent + 4)
        yield from (f"{pad}    for {loop}" for loop in loops[1:])
    else:
        for part in parts:
            yield from _lines(f"{part},", indent + 4)
    yield pad + text[end:]


def is_call(text: str) -> bool:
    """Return whether a text ends with the arguments of a function call."""
    depths = _depths(text)[1]
    start = text.find("(")
    return text[:start].replace(".", "_").isidentifier() and depths.index(0, start) == len(text) - 1


def _is_bracketed(text: str) -> bool:
    """Return whether the whole text is in brackets. This is so for sums, products and
    chains of calls.
    """
    masked, depths = _depths(text)
    found = [m for m in re.finditer(r" [-+*/@<>=]+ |[)\]]\.", masked) if not depths[m.start()]]
    return len(found) > 1 or any(each[0][0] == " " for each in found)


def _spread(before: str, parts: list[str], after: str) -> list[str]:
    pad = before[: len(before) - len(before.lstrip())]
    return [before, *(f"{pad}    {part}," for part in parts), pad + after]


def _depths(text: str) -> tuple[str, list[int]]:
    """Return a text without its string literals, and the number of open brackets after
    each character.
    """
    masked = re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), text)
    return masked, list(itertools.accumulate((c in "([{") - (c in ")]}") for c in masked))


def _parts(text: str, separator: str) -> list[str]:
    """Return the parts between separators that are outside of brackets."""
    masked, depths = _depths(text)
    cuts = [found.start() for found in re.finditer(separator, masked) if not depths[found.start()]]
    edges = zip([0, *(cut + len(separator) for cut in cuts)], [*cuts, len(text)], strict=True)
    return [text[begin:end].rstrip(",") for begin, end in edges]
