"""Provide what all commands share: help pages with examples, and error messages.

Commands end silently if the program that reads their output ends first, as ``head`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._base import source
from .._base.errors import Error

FOUND, WRONG_USE = 1, 2  # exit statuses, which the page of commands explains


class Misuse(Exception):  # noqa: N818 (what a user did, not a failure)
    """A command was used wrongly. Only the message is printed."""


@contextlib.contextmanager
def misuse() -> Iterator[None]:
    """Report errors of the library in this block as wrong use of the command."""
    try:
        yield
    except Error as error:
        raise Misuse(error.message) from None


def check_file(path: str | Path) -> None:
    if not Path(path).is_file():
        raise Misuse(f"There is no file {path}")


def complete() -> None:
    """Run the package's ``__init__``, which ``poptorch_commands`` skipped to start quickly."""
    package = sys.modules[__name__.partition(".")[0]]
    spec = package.__spec__
    if not hasattr(package, "__version__") and spec is not None and spec.loader is not None:
        spec.loader.exec_module(package)


def add(commands: Any, name: str, does: str, example: str, details: str = "") -> Any:
    return commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.\n{details}".strip(),
        **page(example),
    )


def page(example: str) -> dict[str, Any]:
    lines = "\n".join(f"  {line}" for line in example.strip().splitlines())
    formatter = argparse.RawDescriptionHelpFormatter
    return {"epilog": f"example:\n{lines}", "formatter_class": formatter}


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Print wrong use as one message. End silently if the program that reads the output ends."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        started = [os.path.abspath(sys.argv[0])] if arguments is None else []
        try:
            try:
                # frames in the command's own file are not lines of the user
                with source.excluding(started):
                    return main(arguments)
            except Misuse as error:
                print(error, file=sys.stderr)
                return WRONG_USE
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python writes the rest of its buffer again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + 13  # the status that a shell reports for a program that SIGPIPE ended

    return run
