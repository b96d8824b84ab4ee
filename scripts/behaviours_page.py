"""Write docs/behaviours.md: a numbered list of behaviours, each with the tests that show it.

Usage: python scripts/behaviours_page.py

The sentences come from docs/behaviours.toml. Tests cite them by number, with
``@pytest.mark.spec("data", 3)``.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "behaviours.toml"
PAGE = ROOT / "docs" / "behaviours.md"
HEAD = """\
# Behaviours that tests show

This page lists the behaviours of PopTorch that scripts depend on, according to its public documents
and to published programs. The links after a sentence lead to the tests that show the behaviour. A
test cites a behaviour by its section and number: `@pytest.mark.spec("data", 3)`. If this library
intentionally differs from PopTorch for IPUs, [differences.md](differences.md) says so.

`scripts/behaviours_page.py` creates this page from [behaviours.toml](behaviours.toml) and from the
tests.
"""

Cited = tuple[str, int]  # chapter, number


def marks(node: ast.AST) -> Iterator[Cited]:
    """Yield the behaviours that calls of ``pytest.mark.spec`` in a node cite."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.spec":
            chapter, *numbers = (ast.literal_eval(argument) for argument in call.args)
            yield from ((chapter, number) for number in numbers)


def citations(folder: Path) -> dict[Cited, list[tuple[Path, str]]]:
    """Return the tests (file, name) that cite each behaviour."""
    tests = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    for cited in marks(mark):
                        tests[cited].append((path, node.name))
    return tests


def page(table: Path = TABLE, folder: Path = ROOT / "tests") -> str:
    """Return the text of the page.

    Raises:
        ValueError: a test cites a number that is not in the table, a number has neither a citation
            nor a reason, or a number with a reason is cited or unknown.
    """
    chapters = tomllib.loads(table.read_text())
    reasons = {
        (chapter, int(number)): why
        for chapter, numbers in chapters.pop("uncited").items()
        for number, why in numbers.items()
    }
    tests, known = citations(folder), set[Cited]()
    text = [HEAD]
    for chapter, content in chapters.items():
        text.append(f"\n## {content['title']} (`{chapter}`)\n\n")
        if "symbols" in content:
            text.append(f"{content['symbols']}\n\n")
        for number, sentence in enumerate(content["behaviours"], 1):
            cited = (chapter, number)
            known.add(cited)
            links = _links(tests[cited]) if cited in tests else ""
            text.append(f"{number}. {sentence} {links or _why_not(reasons.get(cited))}\n")
    _complain("cited, but not in the table", set(tests) - known)
    _complain("neither cited nor explained", known - set(tests) - set(reasons))
    _complain("explained, but cited or unknown", set(reasons) - (known - set(tests)))
    return "".join(text)


def _why_not(reason: str | None) -> str:
    return f"*Not shown: {reason}.*"


def _links(tests: list[tuple[Path, str]]) -> str:
    links = (f"[{name}](../{path.relative_to(ROOT).as_posix()})" for path, name in tests)
    return f"({', '.join(links)})"


def _complain(what: str, cited: set[Cited]) -> None:
    if cited:
        raise ValueError(f"{what}: {sorted(cited)}")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
