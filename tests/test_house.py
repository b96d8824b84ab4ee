"""Names say what a thing is: no value is called after how it was come by."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers.source_tree import ROOT, parse

FILES = sorted((ROOT / "src").rglob("*.py"))
SAY_NOTHING = {"found"}


def names(tree: ast.AST) -> set[str]:
    """Return the names that a file binds: variables and parameters."""
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return bound | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_say_what_a_value_is(path: Path) -> None:
    assert not names(parse(path)) & SAY_NOTHING


@pytest.mark.parametrize("code", ["found = 1", "for found in x: pass", "lambda found: 0"])
def test_such_a_name_is_noticed(code: str) -> None:
    assert names(ast.parse(code)) & SAY_NOTHING
