"""The command ``poptorch``: options, cache, doctor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import cache, doctor, options

COMMANDS = (options, cache, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="poptorch", description="Tools beside the library.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)  # type: ignore[no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
