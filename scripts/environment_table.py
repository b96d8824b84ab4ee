"""Write docs/reference/environment.md from the library's own table of variables.

Usage: python scripts/environment_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._base import env

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "environment.md"
HEAD = """\
# Environment variables

This page lists every environment variable that poptorch reads. Values that your Python code sets
explicitly take precedence, except over `POPLAR_ENGINE_OPTIONS`. An empty variable counts as unset.
A flag is on if it is a number other than 0, or `true`, `yes` or `on`.

`scripts/environment_table.py` generates this page from `src/poptorch/_base/env.py`.

| variable | default | effect |
|---|---|---|
"""


def _shown(default: object) -> str:
    if default is None or default == "":
        return "unset"
    return "off" if default is False else f"`{default}`"


def page() -> str:
    """Return the text of the page."""

    def row(variable: env.Variable) -> str:
        return f"| `{variable.name}` | {_shown(variable.default)} | {variable.effect} |\n"

    return HEAD + "".join(map(row, env.TABLE.values()))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
