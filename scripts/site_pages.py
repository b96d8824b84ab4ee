"""Pages of the site that are made when it is built: notebooks, commands."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import notebook_page

ROOT = Path(__file__).resolve().parent.parent
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
    "reference/commands.md": commands_page,
}
