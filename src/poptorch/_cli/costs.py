"""Implement ``poptorch estimate`` and ``poptorch report``: what models would cost on IPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .._base.errors import visible
from .._base.tables import text_of
from .._ipu_model import profile, report_page, scaling
from .._ipu_systems import system_of
from ..executor import PoplarExecutor
from .commands import FOUND, Misuse, check_file, misuse
from .scripts import at_first_call

_LINK = ("--processes", "--latency", "--bandwidth")
_OURS = ("--system", "--all", "--json", "--html", *_LINK)
_CALLS = 10  # number of calls to measure; the first ones are slower, so only the latest count


def estimate(chosen: argparse.Namespace) -> int:
    curve = {name[2:]: getattr(chosen, name[2:]) for name in _LINK if chosen.processes}
    with misuse():
        system_of(chosen.system)
        if curve:
            scaling.link_of(chosen.latency, chosen.bandwidth)
    if not curve and (chosen.latency or chosen.bandwidth):
        raise Misuse(
            "--latency and --bandwidth need --processes, for example --processes 8,64,1024"
        )
    if curve and chosen.all:
        raise Misuse(
            "--processes runs one model several times on one batch, so it cannot be "
            "combined with --all"
        )
    check_file(chosen.script)
    ours = [each for each in chosen.arguments if each.partition("=")[0] in _OURS]
    if ours:
        print(
            f"{ours[0]} comes after {chosen.script}, so it is passed to the script", file=sys.stderr
        )
    priced: list[Any] = []

    def work(executor: PoplarExecutor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if curve:
            _measure(executor, args, kwargs)
        priced.append(executor.estimate(*args, system=chosen.system, **curve, **kwargs))
        print(priced[-1])

    at_first_call(work, str(chosen.script), chosen.arguments, every=chosen.all)
    if chosen.json:
        priced[-1].to_json(chosen.json)
    if chosen.html:
        priced[-1].to_html(chosen.html)
    return FOUND if any(each.verdict == "does not fit" for each in priced) else 0


def _measure(executor: PoplarExecutor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compile a model, and call it if it has data."""
    if any(each.is_meta for each in executor.model.parameters()):
        return
    if not executor.isCompiled():
        executor.compile(*args, **kwargs)
    for _ in range(_CALLS):
        executor(*args, **kwargs)


def report(chosen: argparse.Namespace) -> int:
    if (chosen.file is None) == (chosen.compare is None):
        raise Misuse("pass one report, or --compare OLD NEW")
    if chosen.budget and chosen.compare is None:
        raise Misuse("--budget limits the increase between two reports: add --compare OLD NEW")
    try:
        with misuse():
            return _show(chosen, profile.parse_budget(chosen.budget) if chosen.budget else {})
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = visible(f"{type(error).__name__}: {error}")
        raise Misuse(f"This is not a report of poptorch: {why}") from None


def _show(chosen: argparse.Namespace, allowed: dict[str, float]) -> int:
    if chosen.compare is None:
        shown, before, changes = profile.read(chosen.file), None, []
        print(visible(text_of(profile.shown(shown))))
    else:
        before, shown = map(profile.read, chosen.compare)
        changes = profile.compare(before, shown)
        print(visible(profile.changes_text(changes)))
    if chosen.html:
        report_page.write(shown, chosen.html, before)
    over = [each for each in changes if each.change > allowed.get(each.name, float("inf"))]
    for each in over:
        print(f"over budget: {each.name} {each.change:+.1%}, allowed {allowed[each.name]:+.1%}")
    return FOUND if over else 0
