"""Run the notebooks of docs/ and store the output of their cells. The site contains them as pages.

Usage: python scripts/notebook_page.py
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
Cell = dict[str, Any]


class Printer:
    """The part of IPython's printer that this script needs."""

    def __init__(self) -> None:
        self.shown = ""

    def text(self, text: str) -> None:
        """Append text to the output."""
        self.shown += text


def shown(value: Any) -> str:
    """Return the text that IPython shows for a value: the first class of the value decides."""
    printer = Printer()
    for cls in type(value).__mro__:
        if "_repr_pretty_" in vars(cls):
            cls._repr_pretty_(value, printer, False)
            return printer.shown
        if "__repr__" in vars(cls):
            break
    return repr(value)


def read(path: Path) -> list[Cell]:
    """Return the cells of a notebook."""
    cells: list[Cell] = json.loads(path.read_text())["cells"]
    return cells


def run(cells: list[Cell]) -> list[Cell]:
    """Run the code cells in order, as a kernel would. Return all cells with their new output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [
        _run(cell, f"cell {number}", names) if cell["cell_type"] == "code" else cell
        for number, cell in enumerate(cells, 1)
    ]


def _run(cell: Cell, name: str, names: dict[str, Any]) -> Cell:
    source = "".join(cell["source"])
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": shown(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        result = {"output_type": "execute_result", "execution_count": None, "metadata": {}}
        outputs.append({**result, "data": data})
    return {**cell, "outputs": outputs}


def page(path: Path) -> str:
    """Return a notebook's page on the site: text, code, and the output of the code."""
    parts = [f"<!-- made of {path.name} by scripts/notebook_page.py -->"]
    for cell in read(path):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text") or data["text/plain"])
            parts.append("".join(data["text/html"]) if "text/html" in data else _block(text))
    last = f"This page is [a notebook]({path.name}) to download and run."
    return "\n\n".join([*parts, last]) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


if __name__ == "__main__":
    # As in the test: nothing is compiled or timed, because times vary from run to run.
    os.environ |= {"POPTORCH_BACKEND": "reference", "OMP_NUM_THREADS": "1"}
    for each in NOTEBOOKS:
        notebook = json.loads(each.read_text())
        notebook["cells"] = run(notebook["cells"])
        each.write_text(json.dumps(notebook, indent=1) + "\n")
        print(f"wrote {each}")
