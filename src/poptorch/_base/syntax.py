"""Parse the user's source code: a function, or the statement that a stack frame executes."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

_Position = tuple[Any, Any]  # a line, and the number of bytes in front of it in this line


def nodes_of(code: CodeType) -> Iterator[tuple[int, ast.expr | ast.stmt]]:
    """Yield the lines and the syntax of a function.

    If its source is not known, as for a lambda inside an expression, yield nothing.
    """
    try:
        text, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(text)))
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt):
            yield first + node.lineno - 1, node


def executed(frame: FrameType) -> ast.AST | None:
    """Return what a frame executes: the innermost lambda, loop or statement without a body.

    Of other statements with a body, such as ``if``, this is the condition only. The result is None
    if the source is not known.
    """
    place = inspect.getframeinfo(frame, context=0).positions
    if place is None or None in place:
        return None
    start, end = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
    return _around(frame.f_code.co_filename, start, end)


@functools.lru_cache  # parsing a long script takes 10 ms
def _around(filename: str, start: _Position, end: _Position) -> ast.AST | None:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None
    path: list[ast.AST] = [tree]
    while (inner := _containing(path[-1], start, end)) is not None:
        path.append(inner)
    for outer, node in reversed(list(itertools.pairwise(path))):
        is_whole = isinstance(node, ast.Lambda | ast.stmt) and not _has_condition(node)
        if is_whole or _has_condition(outer):
            return node
    return None


def _containing(node: ast.AST, start: _Position, end: _Position) -> ast.AST | None:
    """Return the child of a node that contains everything between two positions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr | ast.stmt | ast.keyword | ast.excepthandler):
            found = _containing(child, start, end)  # it has no position itself
            if found is not None:
                return found
            continue
        first = next(iter(getattr(child, "decorator_list", ())), child)  # precedes a definition
        last: _Position = child.end_lineno, child.end_col_offset
        if (first.lineno, first.col_offset) <= start and end <= last:
            return child
    return None


def _has_condition(node: ast.AST) -> bool:
    has_body = isinstance(getattr(node, "body", None), list)
    return has_body and not isinstance(node, ast.For | ast.AsyncFor)
