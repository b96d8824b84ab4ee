"""Reading the package's own source: its files, the imports in them, dotted names. For tests."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "poptorch"


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree. Walking through all files takes a second: tests share this."""
    return tuple(ast.walk(tree))


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute target) of each import; ``from a import b`` is ``a.b``, name or not."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def top_level(tree: ast.AST) -> Iterator[Any]:
    """Yield the nodes that are in no function: what runs when the module is imported."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from top_level(node)


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, ``a.b.c``) of each chain of attributes that starts at a plain name."""
    for node in nodes(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield node.lineno, ".".join([inner.id, *reversed(parts)])
