"""Writes docs/guide/environment.md from the library's own table of variables.

python scripts/environment_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._base import env

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "environment.md"
HEAD = """\
# Environment variables

Everything that the library reads from the environment. What Python code sets explicitly wins,
except over `POPLAR_ENGINE_OPTIONS`. An empty variable counts as unset. A flag is on when it is a
number other than 0, or `true`, `yes` or `on`.

This page is made from `src/poptorch/_base/env.py` by `scripts/environment_table.py`. Variables
marked *planned* are known by name, but nothing reads them yet.

| variable | default | effect |
|---|---|---|
"""


def _shown(default: object) -> str:
    if default is None or default == "":
        return "unset"
    return "off" if default is False else f"`{default}`"


def page() -> str:
    """Return the page as it should be."""
    table = Path(env.__file__)
    files = sorted(table.parent.parent.rglob("*.py"))
    sources = "".join(path.read_text() for path in files if path != table)

    def row(variable: env.Variable) -> str:
        planned = "" if f'"{variable.name}"' in sources else "*planned:* "
        return f"| `{variable.name}` | {_shown(variable.default)} | {planned}{variable.effect} |\n"

    return HEAD + "".join(map(row, env.TABLE.values()))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
