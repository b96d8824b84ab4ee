"""Implement the command ``poptorch`` with its subcommands options, cache, doctor, passes, estimate,
report, export and migrate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._base import VERSION
from .commands import command, complete, page
from .parsers import COMMANDS


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="poptorch",
        description="Tools for scripts that use poptorch. Each command has its own --help.",
        **page("poptorch doctor --help"),
    )
    parser.add_argument("--version", action="version", version=f"poptorch {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for add_command in COMMANDS.values():
        add_command(commands)
    chosen = parser.parse_args(arguments)
    complete()
    return chosen.run(chosen)  # type: ignore[no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
