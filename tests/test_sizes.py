"""One idea per file: short files and short functions, unless the head of the file says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.source_tree import ROOT, parse

MAX_FILE = 400
MAX_FUNCTION = 60
EXCUSE = "Longer than usual because"
FOLDERS = ("src", "examples", "benchmarks", "scripts")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def long_functions(tree: ast.AST) -> Iterator[str]:
    """Yield a sentence for each function whose lines, less the docstring, are too many."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                length -= (text.end_lineno or text.lineno) - text.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{node.name} (line {node.lineno}) has {length} lines"


def too_long(text: str) -> bool:
    """Tell whether a file is too long and its docstring does not say why."""
    if len(text.splitlines()) <= MAX_FILE:
        return False
    return EXCUSE not in " ".join((ast.get_docstring(ast.parse(text)) or "").split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sizes(path: Path) -> None:
    assert not too_long(path.read_text()), (
        f"over {MAX_FILE} lines: split it, or write '{EXCUSE} ...' in its docstring"
    )
    assert not [*long_functions(parse(path))]


def test_both_rules_find_what_they_look_for() -> None:
    lines = "x = 1\n" * MAX_FILE
    assert not too_long(lines)
    assert too_long(lines + "y = 2\n")
    assert not too_long(f'"""A table. {EXCUSE}\nit is one table."""\n' + lines)
    body = "    x = 1\n" * (MAX_FUNCTION - 1)
    assert not [*long_functions(ast.parse(f"def f():\n{body}"))]
    assert not [*long_functions(ast.parse(f'def f():\n    """Text.\n\n    More."""\n{body}'))]
    assert [*long_functions(ast.parse(f"def f():\n{body}    return x\n"))]
