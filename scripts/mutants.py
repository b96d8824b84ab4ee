"""Plant defects, one operator, constant or comparison at a time, and see whether tests find them.

``python scripts/mutants.py _update --seed 0 -- tests/update`` makes ``--count`` changes. Each of
them changes a file of ``src/poptorch/_update`` and runs ``pytest -x`` with the arguments after
``--``. ``--record FILE`` stores the outcome of each change, and a later run continues from there.
``--again FILE`` plants the changes of a record in the current code. A line that has changed since
then counts as gone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "poptorch"
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_SAID = (ast.Raise, ast.Assert, ast.JoinedStr)  # texts and checks, which do not change results
HANGS = "240"
"""Seconds after which a test counts as failed: a change may make a loop endless."""


Change = dict[str, Any]


def changed(node: ast.AST) -> ast.AST | None:
    """Return an expression with one change, or None if nothing can be changed."""
    other: Any = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op, *_]) if type(op) in SWAPS:
            other.ops[0] = SWAPS[type(op)]()
        case ast.BinOp() | ast.BoolOp() if type(other.op) in SWAPS:
            other.op = SWAPS[type(other.op)]()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Constant(value=int() | float()):
            other.value += 1
        case _:
            return None
    return other


def running(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the function and the node of all code that runs when functions are called.

    Annotations, and the texts of errors, assertions and log lines, are left out.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _SAID):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).startswith(("log.", "zip")):
                continue
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if inside and isinstance(child, ast.expr):
                yield inside, child
            yield from running(child, inside)


def possible(path: Path) -> Iterator[Change]:
    """Yield the possible changes of a file: its name, a function, and lines before and after."""
    text = path.read_text()
    lines = text.encode().splitlines(keepends=True)
    for function, node in running(ast.parse(text)):
        other = changed(node)
        if other is not None:
            first, last = node.lineno - 1, node.end_lineno or 0
            old = b"".join(lines[first:last])
            tail = lines[last - 1][node.end_col_offset :]
            new = old[: node.col_offset] + f"({ast.unparse(other)})".encode() + tail
            name = str(path.relative_to(PACKAGE))
            at = b"".join(lines[:first]).count(old)
            yield {"file": name, "function": function, "at": at, "old": old.decode(),
                   "new": new.decode()}  # fmt: skip


def drawn(folder: str, count: int, seed: int) -> list[Change]:
    """Return random changes in a folder. The same seed returns the same changes."""
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    every = [change for path in paths for change in possible(path)]
    return random.Random(seed).sample(every, count)


def outcome(change: Change, words: list[str]) -> str:
    """Plant a change, run the tests, and undo the change. Return the result of the tests."""
    path = PACKAGE / change["file"]
    text = path.read_text() if path.exists() else ""
    parts = text.split(change["old"])
    if len(parts) < 2:
        return "gone"
    at = min(change["at"], len(parts) - 2) + 1
    before, after = (change["old"].join(some) for some in (parts[:at], parts[at:]))
    path.write_text(before + change["new"] + after)
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", f"--timeout={HANGS}", *words]
    try:
        done = subprocess.run(command, cwd=PACKAGE.parents[1], capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1, 2):
        raise SystemExit(done.stdout + done.stderr)
    return "caught" if done.returncode else "survived"


def main() -> None:
    """Plant changes in a folder of the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of src/poptorch to change, for example _update")
    parser.add_argument("--count", type=int, default=8, help="number of changes (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: 0)")
    parser.add_argument(
        "--record", type=Path, help="JSON file of the results; an existing file is continued"
    )
    parser.add_argument("--again", type=Path, help="repeat the changes of this JSON file")
    parser.add_argument("tests", nargs="+", help="arguments of pytest")
    chosen = parser.parse_args()
    if chosen.record and chosen.record.exists():
        changes = json.loads(chosen.record.read_text())
    elif chosen.again:
        kept = json.loads(chosen.again.read_text())
        changes = [{key: each[key] for key in each if key != "outcome"} for each in kept]
    else:
        changes = drawn(chosen.folder, chosen.count, chosen.seed)
    for change in (each for each in changes if "outcome" not in each):
        change["outcome"] = outcome(change, chosen.tests)
        print(f"{change['outcome']:9}{change['file']}: {change['function']}", flush=True)
        print(f"  - {change['old'].strip()}\n  + {change['new'].strip()}", flush=True)
        if chosen.record:
            chosen.record.write_text(json.dumps(changes, indent=1))
    outcomes = [change["outcome"] for change in changes]
    print(*(f"{outcomes.count(each)} {each}" for each in ("caught", "survived", "gone")), sep=", ")


if __name__ == "__main__":
    main()
