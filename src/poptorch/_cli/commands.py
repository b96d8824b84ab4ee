"""What commands share: help pages with an example, silence when nobody reads on, scripts."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._base import source
from .._base.errors import Error

FOUND, WRONG_USE = 1, 2  # exit statuses; the page of commands explains them


class Misuse(Exception):  # noqa: N818 (what a user did, not a failure)
    """A command was used wrongly; its message is all that is printed."""


@contextlib.contextmanager
def misuse() -> Iterator[None]:
    """Let errors of the library in this block be the user's of the command."""
    try:
        yield
    except Error as error:
        raise Misuse(error.message) from None


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
    """Make wrong use one message, and end silently when the reader of the output has gone."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        started = [os.path.abspath(sys.argv[0])] if arguments is None else []
        try:
            try:
                with source.excluding(started):  # the command's own file is no line of the user
                    return main(arguments)
            except Misuse as error:
                print(error, file=sys.stderr)
                return WRONG_USE
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python writes what is left in its buffer once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + 13  # what a shell reports of a program that SIGPIPE ended

    return run


class Enough(BaseException):
    """The script has shown what there is to see. No ``except Exception`` may swallow it."""


def run_script(path: str, arguments: Sequence[str], function: str = "") -> None:
    """Run a script, or only import it and call a function of it."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        with contextlib.suppress(Enough):
            names = runpy.run_path(path, run_name="imported" if function else "__main__")
            if function:
                if not callable(names.get(function)):
                    raise Misuse(f"{path} has no function {function}")
                names[function]()
    finally:
        sys.argv, sys.path[:] = before
