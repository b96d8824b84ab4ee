"""Writes docs/reference/environment.md from the library's own table of variables.

python scripts/environment_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._base import env

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "environment.md"
HEAD = """\
# Environment variables

Everything that the library reads from the environment. What Python code sets explicitly wins,
except over `POPLAR_ENGINE_OPTIONS`. An empty variable counts as unset. A flag is on when it is a
number other than 0, or `true`, `yes` or `on`.

This page is made from `src/poptorch/_base/env.py` by `scripts/environment_table.py`.

| variable | default | effect |
|---|---|---|
"""


def _shown(default: object) -> str:
    if default is None or default == "":
        return "unset"
    return "off" if default is False else f"`{default}`"


def page() -> str:
    """Return the page as it should be."""

    def row(variable: env.Variable) -> str:
        return f"| `{variable.name}` | {_shown(variable.default)} | {variable.effect} |\n"

    return HEAD + "".join(map(row, env.TABLE.values()))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
