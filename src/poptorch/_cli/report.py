"""``poptorch report``: print a profile report, or compare two within a budget."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .._base.errors import Error, visible
from .._ipu_model import page, profile
from .commands import add


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = add(
        commands,
        "report",
        "print a profile report, or compare two",
        "poptorch report reports/training\n"
        "poptorch report --html page.html reports/training/profile.json\n"
        "poptorch report --compare old/training new/training --budget memory=3%,cycles=1%",
        "With a budget the exit status is 1 if the new one needs more than it allows.",
    )
    parser.add_argument("file", type=Path, nargs="?", help="profile.json, or its directory")
    parser.add_argument("--html", type=Path, help="write the page into this file")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two of them instead"
    )
    parser.add_argument("--budget", help="what the new one may need more: memory=3%%,cycles=1%%")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print; return 1 if a budget is exceeded, 2 if there is nothing to print."""
    if (chosen.file is None) == (chosen.compare is None):
        print("poptorch report: give one report, or --compare OLD NEW", file=sys.stderr)
        return 2
    try:
        return _show(chosen, profile.parse_budget(chosen.budget) if chosen.budget else {})
    except Error as error:
        print(f"poptorch report: {error}", file=sys.stderr)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = visible(f"{type(error).__name__}: {error}")
        print(f"poptorch report: this is no report of poptorch: {why}", file=sys.stderr)
    return 2


def _show(chosen: argparse.Namespace, allowed: dict[str, float]) -> int:
    if chosen.compare is None:
        shown, before, changes = profile.read(chosen.file), None, []
        print(visible(profile.text(shown)))
    else:
        before, shown = map(profile.read, chosen.compare)
        changes = profile.compare(before, shown)
        print(visible(profile.changes_text(changes)))
    if chosen.html and not page.write(shown, chosen.html, before):
        return 2
    over = profile.exceeded(changes, allowed)
    for each in over:
        print(f"over budget: {each.name} {each.change:+.1%}, allowed {allowed[each.name]:+.1%}")
    return 1 if over else 0
