"""Pages of the site that are made when it is built: errors by title, commands.

python scripts/site_pages.py errors, or commands, prints one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import notebook_page

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "src" / "poptorch" / "_base" / "errors.py"
ERRORS = """\
# Errors by title

An error says what happened, with the values, your line, and what to do. This is every title, in
alphabetical order, with the remedies; *...* stands for what differs from case to case. All of them
are `poptorch.Error`; where one is a builtin exception, too, that stands beside it.

| title | is | remedy |
|---|---|---|
"""
COMMANDS = """\
# Commands

`python -m poptorch` is `poptorch`. Their exit statuses:

| status | meaning |
|---|---|
| 0 | all is well |
| 1 | `doctor` found what stops a model, `estimate` one that does not fit, `report` too much |
| 2 | wrong use: arguments, a missing file or device, a script without a wrapped model |
| other | of `poprun`: that of the process that failed first, or 128 and its signal |

"""


def _classes() -> dict[str, str]:
    """Return the classes of errors, with the builtin that each is."""
    tree = ast.parse(BASE.read_text())
    return {
        node.name: next(
            (base.id for base in node.bases if isinstance(base, ast.Name) and base.id != "Error"),
            "",
        ).replace("Exception", "")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


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
            made = isinstance(call.func, ast.Name) and call.func.id in classes and call.args
            if made and names and ast.unparse(call.args[0]) == names[0]:
                helpers[function.name] = call
    return helpers


@functools.cache
def errors() -> frozenset[tuple[str, str, str]]:
    """Return title, builtin class and remedies of each error that the library's code makes."""
    classes, rows = _classes(), set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        helpers = _helpers(tree, classes)
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            call = helpers.get(name, node)
            kind = call.func.id if isinstance(call.func, ast.Name) else ""
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


def errors_page() -> str:
    """Return the page of errors."""
    rows = sorted(errors(), key=lambda row: (row[0].lstrip("`'. ").lower(), row))
    return ERRORS + "".join(
        f"| {_cell(title)} | {f'`{kind}`' if kind else ''} | {_cell(fix)} |\n"
        for title, kind, fix in rows
    )


def _help(run: Callable[..., object], command: str, *words: str) -> str:
    shown = io.StringIO()
    before = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [command], "100"  # argparse has no other way to be told
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            run([*words, "--help"])
    finally:
        sys.argv = before[0]
        os.environ.pop("COLUMNS")
        if before[1] is not None:
            os.environ["COLUMNS"] = before[1]
    return shown.getvalue()


def commands_page() -> str:
    """Return the page of commands: the help of each."""
    from poptorch._cli import gc_tools, main, poprun

    calls = [
        (main.main, "poptorch"),
        *((main.main, "poptorch", name) for name in main.COMMANDS),
        (poprun.main, "poprun"),
        (gc_tools.monitor, "gc-monitor"),
        (gc_tools.info, "gc-info"),
    ]
    parts = [
        f"## {' '.join(words)}\n\n```text\n{_help(run, *words).rstrip()}\n```\n"
        for run, *words in calls
    ]
    return COMMANDS + "\n".join(parts)


PAGES = {
    **{
        path.relative_to(notebook_page.DOCS).with_suffix(".md").as_posix(): functools.partial(
            notebook_page.page, path
        )
        for path in notebook_page.NOTEBOOKS
    },
    "reference/errors.md": errors_page,
    "reference/commands.md": commands_page,
}

if __name__ == "__main__":
    print(PAGES[f"reference/{sys.argv[1]}.md"]())
