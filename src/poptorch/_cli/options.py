"""``poptorch options``: what every option does here, and its value in the present environment."""

from __future__ import annotations

import argparse
from typing import Any

from ..options import Options
from ..options.overview import describe


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = commands.add_parser(
        "options", help="show every option, its value and whether it has an effect here"
    )
    parser.add_argument("file", nargs="*", help="files of option calls, as for loadFromFile")
    parser.add_argument("--all", action="store_true", help="show backend settings not set, too")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the table."""
    options = Options()
    for file in chosen.file:
        options.loadFromFile(file)
    print(describe(options, every=chosen.all))
    return 0
