"""Generate pages during the build of the site: notebooks and commands."""

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

`python -m poptorch` is the same as `poptorch`. The commands have these exit statuses:

| status | meaning |
|---|---|
| 0 | success |
| 1 | `doctor` found a problem, a model of `estimate` does not fit, or `report` is over budget |
| 2 | wrong arguments, a missing file or device, or a script that wraps no model |
| other | `poprun` returns the status of the first process that failed, or 128 plus its signal |

"""


def _help(run: Callable[..., object], command: str, *words: str) -> str:
    shown = io.StringIO()
    before = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = (
        [command],
        "100",
    )  # argparse reads the width only from this variable
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
    """Return the page of commands, with the help text of each."""
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
