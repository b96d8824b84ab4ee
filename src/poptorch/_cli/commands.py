"""What every command shares: a help page with an example, and silence when nobody reads on."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

PIPE_CLOSED = 128 + 13  # what a shell reports of a program that SIGPIPE ended


def add(commands: Any, name: str, does: str, example: str, details: str = "") -> Any:
    """Add a command and return its parser.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        does: one line, for the list of commands.
        example: command lines that a reader can copy.
        details: the rest of its help page.
    """
    return commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.\n{details}".strip(),
        epilog=shown(example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def shown(example: str) -> str:
    """Return the part of a help page that shows command lines."""
    return "example:\n" + "\n".join(f"  {line}" for line in example.strip().splitlines())


class Main(Protocol):
    """The entry point of a command: its arguments, by default the process's, to its status."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def quiet_when_closed(main: Main) -> Main:
    """Let a command end without a word when the reader of its output has gone (``| head``)."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(arguments)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python writes what is left in its buffer once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED

    return run
