"""``poptorch estimate``: what the models of a script would cost on IPUs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._base.errors import Error
from .._systems import parse
from .commands import Enough, add, intercepted, run_script

_OURS = ("--system", "--all", "--json", "--html")


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = add(
        commands,
        "estimate",
        "say what the models of a script would cost on IPUs",
        "poptorch estimate train.py\npoptorch estimate --system bow:64 --all train.py --epochs 1",
        "The script runs until it first compiles or calls a wrapped model. That is priced instead\n"
        "and the script ends. With --all each wrapped model is priced when it is first used, and\n"
        "the script runs to its end.",
    )
    parser.add_argument("--system", default="bow:16", help="the chips, kind:number (bow:16)")
    parser.add_argument("--all", action="store_true", help="price every model and run the script")
    parser.add_argument("--json", type=Path, help="write the last estimate into this file, too")
    parser.add_argument("--html", type=Path, help="write its page into this file, too")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run the script and print the estimates.

    Returns:
        1 if it used no wrapped model or one does not fit, 2 if there is nothing to run or price.
    """
    try:
        parse(chosen.system)
    except Error as error:
        print(f"poptorch estimate: {error}", file=sys.stderr)
        return 2
    if not chosen.script.is_file():
        print(f"poptorch estimate: there is no script {chosen.script}", file=sys.stderr)
        return 2
    ours = [each for each in chosen.arguments if each.partition("=")[0] in _OURS]
    if ours:
        print(f"{ours[0]} after {chosen.script} is the script's argument", file=sys.stderr)
    priced: list[Any] = []
    with _pricing(chosen, priced):
        run_script(str(chosen.script), chosen.arguments)
    if not priced:
        print(f"{chosen.script} used no wrapped model", file=sys.stderr)
        return 1
    if chosen.json:
        priced[-1].to_json(chosen.json)
    if chosen.html:
        priced[-1].to_html(chosen.html)
    return 0 if all(estimate.fits for estimate in priced) else 1


@contextlib.contextmanager
def _pricing(chosen: argparse.Namespace, priced: list[Any]) -> Iterator[None]:
    """Within this, what first uses an executor has it priced."""
    from ..executor import PoplarExecutor

    seen: dict[int, PoplarExecutor] = {}  # kept, so that no other object gets the number of one

    def first(usual: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> Any:
        if id(executor) not in seen:
            seen[id(executor)] = executor
            priced.append(executor.estimate(*args, system=chosen.system, **kwargs))
            kind = "inference" if executor._optimizer is None else "training"
            print(f"{type(executor.model).__name__}, {kind}, {priced[-1]}")
            if not chosen.all:
                raise Enough
        return usual(executor, *args, **kwargs)

    with intercepted([(PoplarExecutor, name, first) for name in ("__call__", "compile")]):
        yield
