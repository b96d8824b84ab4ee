"""Write what each file of src decides into ARCHITECTURE.md: the first sentences of its docstring.

Usage: python scripts/files_table.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- scripts/files_table.py -->\n", "<!-- end of the files -->\n"
_INIT, _PACKAGE = "__init__.py", "poptorch"


def first_paragraph(path: Path) -> str:
    """Return the first paragraph of a module's docstring, or of the comment of a table."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
        text = "\n".join(line.removeprefix("# ") for line in lines)
    return " ".join(text.partition("\n\n")[0].split())


def folders() -> Iterator[tuple[Path, list[Path]]]:
    """Yield the folders of src with their modules and tables, without the ``__init__`` of each."""
    source = ROOT / "src"
    paths = [path for suffix in ("py", "toml") for path in source.rglob(f"*.{suffix}")]
    for folder in sorted({path.parent for path in paths}, key=_name):
        yield folder, sorted(p for p in paths if p.parent == folder and p.name != _INIT)


def _name(folder: Path) -> str:
    name = folder.relative_to(ROOT / "src").as_posix()
    return f"{name.removeprefix(f'{_PACKAGE}/')}/" if name != _PACKAGE else ""


def as_text() -> str:
    parts = []
    for folder, files in folders():
        title = f"`{_name(folder)}`" if _name(folder) else "Directly in `poptorch/`"
        rows = [f"| `{file.name}` | {_cell(first_paragraph(file))} |" for file in files]
        table = ["", "| file | what it does |", "|---|---|", *rows] if rows else []
        parts.append("\n".join([f"### {title}", "", first_paragraph(folder / _INIT), *table]))
    return "\n\n".join(["", *parts, ""])


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """Return the text of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + as_text() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
