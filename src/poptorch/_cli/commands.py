"""What commands share: help pages with an example, silence when nobody reads on, scripts."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


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


def quiet_when_closed(main: Callable[..., int]) -> Callable[..., int]:
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
            return 128 + 13  # what a shell reports of a program that SIGPIPE ended

    return run


class Enough(BaseException):
    """The script has shown what there is to see. No ``except Exception`` may swallow it."""


def run_script(path: str, arguments: Sequence[str]) -> None:
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        with contextlib.suppress(Enough):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
