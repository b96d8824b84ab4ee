"""Write docs/reference/errors.md: every title of an error, and its remedies.

What changes there, users notice; tests match values, and a word of a title at most.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "errors.md"
HEAD = """\
# Errors by title

<!-- Written by scripts/errors_page.py. -->

This page lists every error in alphabetical order of its title (the first line of the message), and
the remedies that it suggests. *...* stands for values that differ from case to case. In addition to
the title and the remedies, an error shows the values that caused it and your own source line. All
errors are instances of `poptorch.Error`. If an error is also an instance of a builtin exception,
the second column names that exception.

| title | also a | what to do |
|---|---|---|
"""


def _classes(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return ``Error`` and all classes that derive from it, with the builtin that each is."""
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: [_name(base) for base in node.bases] for node in nodes}
    classes = {"Error": ""}
    while more := {name for name in bases.keys() - classes if classes.keys() & bases[name]}:
        for name in more:
            builtin = next((base for base in bases[name] if hasattr(builtins, base)), "")
            above = next(classes[base] for base in bases[name] if base in classes)
            classes[name] = builtin.replace("Exception", "") or above
    return classes


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr | None) -> str:
    """Return a text as it is written, with *...* for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Tuple):
        return "; ".join(filter(None, map(_text, node.elts)))
    return "..." if isinstance(node, ast.FormattedValue) else ""


def _helpers(tree: ast.Module, classes: dict[str, str]) -> dict[str, ast.Call]:
    """Return the functions of a file that make an error whose title is their first argument."""
    helpers = {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names = [argument.arg for argument in function.args.args]
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if (
                _name(call.func) in classes
                and call.args
                and names
                and ast.unparse(call.args[0]) == names[0]
            ):
                helpers[function.name] = call
    return helpers


def errors() -> frozenset[tuple[str, str, str]]:
    """Return title, builtin class and remedies of each error that the library's code makes."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))]
    classes, rows = _classes(trees), set()
    for tree in trees:
        helpers = _helpers(tree, classes)
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            call = helpers.get(_name(node.func), node)
            kind = _name(call.func)
            title = _text(node.args[0])
            if kind in classes and title.strip(". "):
                words = [*node.keywords, *call.keywords]
                fix = next((word.value for word in words if word.arg == "fix"), None)
                if isinstance(fix, ast.Name):
                    fix = constants.get(fix.id)
                rows.add((title, classes[kind], _text(fix)))
    return frozenset(rows)


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text.replace("\n", " ")).replace("...", "*...*")


def page() -> str:
    rows = sorted(errors(), key=lambda row: (row[0].lstrip("`'. ").lower(), row))
    return HEAD + "".join(
        f"| {_cell(title)} | {f'`{kind}`' if kind else ''} | {_cell(fix)} |\n"
        for title, kind, fix in rows
    )


if __name__ == "__main__":
    PAGE.write_text(page())
