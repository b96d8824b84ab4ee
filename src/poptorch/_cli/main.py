"""The command ``poptorch``: options, cache, doctor, passes, estimate, report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._base import VERSION
from . import cache, doctor, estimate, options, passes, report
from .commands import quiet_when_closed, shown

COMMANDS = (options, cache, doctor, passes, estimate, report)


@quiet_when_closed
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="poptorch",
        description="Tools beside the library. Each command has a help page of its own.",
        epilog=shown("poptorch doctor --help"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"poptorch {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)  # type: ignore[no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
