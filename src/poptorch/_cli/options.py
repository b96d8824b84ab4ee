"""``poptorch options``: what every option does here, and its value in the present environment."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..options import Options
from ..options.overview import describe
from . import commands as shared

FAULTY = 2  # argparse's own status for a command line that cannot be understood


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = shared.add(
        commands,
        "options",
        "show every option, its value and whether it has an effect here",
        "poptorch options\npoptorch options training.cfg --all",
    )
    parser.add_argument("file", nargs="*", help="files of option calls, as for loadFromFile")
    parser.add_argument("--all", action="store_true", help="show backend settings not set, too")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the table; 2 if a file, or POPTORCH_DEFAULT_OPTIONS, cannot be applied."""
    try:
        options = Options()
        for file in chosen.file:
            options.loadFromFile(file)
    except Exception as error:  # whatever a setter raises is about the file's line
        notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
        print(f"poptorch options: {error}", *notes, sep="\n", file=sys.stderr)
        return FAULTY
    print(describe(options, every=chosen.all))
    return 0
