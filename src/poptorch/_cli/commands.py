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
from typing import Any, Protocol

PIPE_CLOSED = 128 + 13  # what a shell reports of a program that SIGPIPE ended


def add(commands: Any, name: str, does: str, example: str, details: str = "") -> Any:
    return commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.\n{details}".strip(),
        epilog=shown(example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def shown(example: str) -> str:
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


@contextlib.contextmanager
def intercepted(methods: Sequence[tuple[type, str, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block functions stand in for methods of classes; they get these first."""
    with contextlib.ExitStack() as stack:
        for cls, name, stand_in in methods:
            usual = vars(cls)[name]
            stack.callback(setattr, cls, name, usual)
            setattr(cls, name, _around(usual, stand_in))
        yield


def _around(usual: Any, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return stand_in(usual, self, *args, **kwargs)

    return called
