"""Reading the package's own source: its files, the imports in them, dotted names. For tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "poptorch"


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted target) of each import, relative ones resolved.

    ``from a import b`` yields ``a.b``, whether b is a module or a name.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def top_level(tree: ast.Module) -> ast.Module:
    """Return the tree without the bodies of functions: what runs when the module is imported."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return ast.Pass(lineno=node.lineno, col_offset=node.col_offset)

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
        visit_Lambda = visit_FunctionDef  # noqa: N815

    return Strip().visit(tree)


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, ``a.b.c``) of each chain of attributes that starts at a plain name."""
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield node.lineno, ".".join([inner.id, *reversed(parts)])
