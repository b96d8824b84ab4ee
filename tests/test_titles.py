"""The titles of all errors, in one list: other tests match a word of them at most.

``python tests/test_titles.py`` writes the list anew; what changes there, users notice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
LIST = Path(__file__).with_name("titles.txt")


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def family(nodes: list[ast.AST]) -> set[str]:
    """Return the names of ``Error`` and of all classes that derive from it."""
    classes = {n.name: set(map(name_of, n.bases)) for n in nodes if isinstance(n, ast.ClassDef)}
    found = {"Error"}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found


def titles() -> Iterator[str]:
    """Yield each title that stands where the error is made; values in it are ``{…}``."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    errors = family(nodes)
    for call in (node for node in nodes if isinstance(node, ast.Call) and node.args):
        title = call.args[0]
        if name_of(call.func) not in errors:
            continue
        parts = title.values if isinstance(title, ast.JoinedStr) else [title]
        texts = [part.value if isinstance(part, ast.Constant) else "{…}" for part in parts]
        if texts != ["{…}"]:
            yield "".join(map(str, texts))


def test_the_list_has_every_title() -> None:
    assert sorted(set(titles())) == LIST.read_text().splitlines(), (
        "run: python tests/test_titles.py"
    )


if __name__ == "__main__":
    LIST.write_text("".join(f"{title}\n" for title in sorted(set(titles()))))
