"""``poptorch estimate`` and ``poptorch report``: what models would cost on IPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base.errors import visible
from .._base.private import replaced
from .._base.tables import text_of
from .._ipu_model import page, profile, scaling
from .._systems import system_of
from ..executor import PoplarExecutor
from .commands import FOUND, Enough, Misuse, add, misuse, run_script

_LINK = ("--processes", "--latency", "--bandwidth")
_OURS = ("--system", "--all", "--json", "--html", *_LINK)
_CALLS = 10  # that measure a call: the first ones are slower, the latest count


def add_estimate(commands: Any) -> None:
    parser = add(
        commands,
        "estimate",
        "estimate the cost of a script's models on IPUs",
        "poptorch estimate train.py\npoptorch estimate --system bow:64 --all train.py --epochs 1\n"
        "poptorch estimate --processes 8,64,1024 --latency 20us --bandwidth 100Gb train.py",
        "The script runs until it first compiles or calls a wrapped model. The command prices it\n"
        "and ends the script. With --all it prices each wrapped model at its first use, and the\n"
        "script runs to its end. With --processes it compiles the model, measures a few calls on\n"
        "this batch, and shows what a call would take in so many processes, a machine each.",
    )
    parser.add_argument("--system", help="the chips, kind:number; default POPTORCH_POD, mk2:64")
    parser.add_argument("--all", action="store_true", help="price every model and run the script")
    parser.add_argument("--processes", type=_counts, metavar="N,N", help="numbers of processes")
    parser.add_argument("--latency", help="of the link between them, one way, for instance 20us")
    parser.add_argument("--bandwidth", help="of the link, for instance 100Gb")
    parser.add_argument("--json", type=Path, help="write the last one's profile into this file")
    parser.add_argument("--html", type=Path, help="write its page into this file, too")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(run=_estimate)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return scaling.counts_of([int(each) for each in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers such as 8,64,1024, not {text}") from None


def _estimate(chosen: argparse.Namespace) -> int:
    curve = {name[2:]: getattr(chosen, name[2:]) for name in _LINK if chosen.processes}
    with misuse():
        system_of(chosen.system)
        if curve:
            scaling.link_of(chosen.latency, chosen.bandwidth)
    if not curve and (chosen.latency or chosen.bandwidth):
        raise Misuse("--latency and --bandwidth are of a curve: add --processes 8,64,1024")
    if curve and chosen.all:
        raise Misuse("--processes runs a model several times on one batch: leave --all out")
    if not chosen.script.is_file():
        raise Misuse(f"There is no file {chosen.script}")
    ours = [each for each in chosen.arguments if each.partition("=")[0] in _OURS]
    if ours:
        print(f"{ours[0]} after {chosen.script} is the script's argument", file=sys.stderr)
    priced: list[Any] = []
    seen: list[PoplarExecutor] = []

    def first(usual: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> Any:
        if executor not in seen:
            seen.append(executor)
            if curve:
                _measure(executor, args, kwargs)
            priced.append(executor.estimate(*args, system=chosen.system, **curve, **kwargs))
            print(priced[-1])
            if not chosen.all:
                raise Enough
        return usual(executor, *args, **kwargs)

    with replaced(PoplarExecutor, "__call__", first), replaced(PoplarExecutor, "compile", first):
        run_script(str(chosen.script), chosen.arguments)
    if not priced:
        raise Misuse(f"{chosen.script} used no wrapped model")
    if chosen.json:
        priced[-1].to_json(chosen.json)
    if chosen.html:
        priced[-1].to_html(chosen.html)
    return FOUND if any(each.verdict == "does not fit" for each in priced) else 0


def _measure(executor: PoplarExecutor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compile a model and call it, unless it has no data."""
    if any(each.is_meta for each in executor.model.parameters()):
        return
    if not executor.isCompiled():
        executor.compile(*args, **kwargs)
    for _ in range(_CALLS):
        executor(*args, **kwargs)


def add_report(commands: Any) -> None:
    parser = add(
        commands,
        "report",
        "print a profile report, or compare two",
        "poptorch report reports/training\n"
        "poptorch report --html page.html reports/training/profile.json\n"
        "poptorch report --compare old/training new/training --budget memory=3%,cycles=1%",
        "With a budget the exit status is 1 if the new one needs more than it allows.",
    )
    parser.add_argument("file", type=Path, nargs="?", help="profile.json, or its directory")
    parser.add_argument("--html", type=Path, help="write the page into this file")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two of them instead"
    )
    parser.add_argument("--budget", help="what the new one may need more: memory=3%%,cycles=1%%")
    parser.set_defaults(run=_report)


def _report(chosen: argparse.Namespace) -> int:
    if (chosen.file is None) == (chosen.compare is None):
        raise Misuse("Give one report, or --compare OLD NEW")
    if chosen.budget and chosen.compare is None:
        raise Misuse("A budget is for what a report needs more than another: add --compare OLD NEW")
    try:
        with misuse():
            return _show(chosen, profile.parse_budget(chosen.budget) if chosen.budget else {})
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = visible(f"{type(error).__name__}: {error}")
        raise Misuse(f"This is no report of poptorch: {why}") from None


def _show(chosen: argparse.Namespace, allowed: dict[str, float]) -> int:
    if chosen.compare is None:
        shown, before, changes = profile.read(chosen.file), None, []
        print(visible(text_of(profile.shown(shown))))
    else:
        before, shown = map(profile.read, chosen.compare)
        changes = profile.compare(before, shown)
        print(visible(profile.changes_text(changes)))
    if chosen.html:
        page.write(shown, chosen.html, before)
    over = [each for each in changes if each.change > allowed.get(each.name, float("inf"))]
    for each in over:
        print(f"over budget: {each.name} {each.change:+.1%}, allowed {allowed[each.name]:+.1%}")
    return FOUND if over else 0
