"""Implement ``poptorch migrate``: translate a PopTorch script into plain PyTorch, line by line."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._base import safe_files
from .commands import Misuse, add, check_file, misuse

if TYPE_CHECKING:
    from .._migrate.scripts import Script

WIDTH = 100


def add_migrate(commands: Any) -> None:
    parser = add(
        commands,
        "migrate",
        "explain a PopTorch script in terms of plain PyTorch, and translate it",
        "poptorch migrate train.py\npoptorch migrate --diff train.py\n"
        "poptorch migrate -o plain.py train.py",
        "The script is read, not run. Each option and call is listed with its line, its\n"
        "counterpart in plain PyTorch, its effect in this library, and one of these groups: it\n"
        "becomes a loop, torch has a replacement, it is only needed on IPUs, or it must be\n"
        "translated by hand.\n\n"
        "The new script only needs torch, and has explicit loops in place of a call's loops.\n"
        "Lines that cannot be translated stay, with a TODO above them. Names are followed\n"
        "through imports, variables, attributes and functions of the file, but not into other\n"
        "files.",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--diff", action="store_true", help="print the changes as a unified diff")
    parser.add_argument(
        "-o", "--output", type=Path, help=("write the translated script into this file")
    )
    parser.set_defaults(run=_migrate)


def _migrate(chosen: argparse.Namespace) -> int:
    if chosen.output == chosen.script:
        raise Misuse(
            f"the translated script would replace {chosen.script}: pass another name to -o"
        )
    script, text = _read(chosen.script)
    if not chosen.diff and chosen.output is None:
        print(_report(script, chosen.script))
        return 0
    from .._migrate.rewriting import rewritten

    with misuse():
        new = rewritten(script)
    if chosen.diff:
        name, old = str(chosen.script), text.splitlines(keepends=True)
        lines = difflib.unified_diff(old, new.splitlines(keepends=True), name, name)
        print("".join(lines), end="")
    if chosen.output is not None:
        safe_files.write_text_for_user(chosen.output, new)
        todo = [
            str(number) for number, line in enumerate(new.splitlines(), 1) if "# TODO: " in line
        ]
        left = (
            f"; change by hand what its TODO comments say, in lines {', '.join(todo)}"
            if todo
            else ""
        )
        if not chosen.diff:
            print(f"wrote {chosen.output}{left}")
    return 0


def _read(file: Path) -> tuple[Script, str]:
    try:
        import libcst
    except ImportError:
        raise Misuse(
            'poptorch migrate reads scripts with libcst: pip install "poptorch[migrate]"'
        ) from None
    from .._migrate.scripts import Script

    check_file(file)
    try:
        text = file.read_text()
        script = Script(text)
    except UnicodeDecodeError:
        raise Misuse(f"{file} is not a text file: pass a Python script") from None
    except libcst.ParserSyntaxError as error:
        lines = text.splitlines() or [""]
        line = min(error.raw_line, len(lines))
        raise Misuse(f"{file}:{line} is not valid Python: {lines[line - 1].strip()}") from None
    if line := script.star():
        raise Misuse(
            f"{file}:{line}: replace the star import by the imported names, so that "
            "it is known which are used"
        )
    return script, text


def _report(script: Script, file: Path) -> str:
    from .._migrate.meanings import CLASSES, PACKAGES, here, meaning

    uses = [
        (node, name, row)
        for node, name in script.uses()
        if (row := meaning(name)) and not row.value
    ]
    if not uses:
        return f"{file} uses none of {', '.join(PACKAGES)}"
    counts = Counter(row.kind for *_, row in uses)
    kinds = ", ".join(f"{counts[kind]} {text}" for kind, text in CLASSES.items() if counts[kind])
    lines = [f"{file}: {kinds}"]
    for node, name, row in uses:
        short = name.removeprefix("poptorch.")
        lines.append(f"\n{script.line(node):4}  {short}  [{row.kind}]")
        lines += _wrapped("PyTorch: ", row.torch) + _wrapped("here:    ", here(name))
    lines.append(f"\nTo get the translated script: poptorch migrate --diff {file}, or -o plain.py")
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    first, more = f"      {start}", " " * (6 + len(start))
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=more)
