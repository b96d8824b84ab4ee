"""Estimate the effect of more processes: a curve over their number, and remedies.

The sources of collectives are in ``_cost/links.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._base.errors import InvalidValue
from .._base.tables import TextPart, size_text, time_text
from .._cost.links import Collective, Link, UpdateExchange, ring


def tree(size: float, processes: int, link: Link, at_once: int = 1) -> float:
    """Return the seconds of a tree, which sends whole tensors, or halves of halves in twice the
    steps, whichever is faster.
    """
    if processes < 2 or not size:
        return 0.0
    levels = math.ceil(math.log2(processes))
    taken = at_once * size * (1 / link.bandwidth + link.copying)
    halving = 2 * levels * link.step + 2 * (1 - 1 / processes) * taken
    return min(levels * (link.step + taken), halving)


def hierarchical(
    size: float, processes: int, link: Link, at_once: int = 1, group: int = 0
) -> float:
    """Return the seconds of a ring in each group and rings between processes with the same part,
    with about equal numbers.
    """
    group = group or _near_root(processes)
    others = ring(size / group, math.ceil(processes / group), link, at_once)
    return ring(size, group, link, at_once) + others


def _near_root(count: int) -> int:
    root = math.isqrt(count)
    return next(each for each in range(root, 0, -1) if count % each == 0)


@dataclass(frozen=True)
class Remedy:
    change: str
    efficiency: float  # the efficiency after the change


@dataclass(frozen=True)
class ScaledCall:
    """A call of this number of processes, each with the present batch of one."""

    processes: int
    seconds: float  # per call
    exchanging: float  # seconds per call that no computation hides
    efficiency: float  # the computation's share: 1 if exchanges cost nothing
    bound: str  # what most time is spent on: computing, latency, bandwidth, copying
    tree: float  # what ``exchanging`` would be with another algorithm for sums
    hierarchical: float
    remedies: tuple[Remedy, ...]  # the best two


@dataclass(frozen=True)
class Scaling:
    """A curve over numbers of processes. Nothing was run, except perhaps one process."""

    computing: float  # seconds of a call of one process
    source: str  # where these come from
    latency: float
    bandwidth: float
    bytes: float  # bytes of the gradients in an update
    rows: tuple[ScaledCall, ...]


def scaling(
    computing: float, source: str, link: Link, exchanged: Mapping[int, UpdateExchange]
) -> Scaling:
    """Return the curve for what these numbers of processes exchange."""
    rows = tuple(_scaled(computing, count, link, own) for count, own in exchanged.items())
    size = max((sum(own.buckets) for own in exchanged.values()), default=0.0)
    return Scaling(computing, source, link.latency, link.bandwidth, size, rows)


def _scaled(computing: float, processes: int, link: Link, own: UpdateExchange) -> ScaledCall:
    def waiting(link: Link = link, by: Collective = ring) -> float:
        return own.seconds(computing, processes, link, by)

    exchanging = waiting()
    costs = {
        "computing": computing,
        "latency": exchanging - waiting(replace(link, latency=0.0, waking=0.0)),
        "bandwidth": exchanging - waiting(replace(link, bandwidth=math.inf)),
        "copying": exchanging - waiting(replace(link, copying=0.0)),
    }
    remedies = sorted(_remedies(computing, processes, link, own), key=lambda r: -r.efficiency)
    efficiency = computing / (computing + exchanging)
    better = [each for each in remedies if each.efficiency > efficiency + 0.005]
    return ScaledCall(
        processes, computing + exchanging, exchanging, efficiency,
        max(costs, key=lambda name: costs[name]), waiting(by=tree), waiting(by=hierarchical),
        tuple(better[:2]),
    )  # fmt: skip


def _remedies(
    computing: float, processes: int, link: Link, own: UpdateExchange
) -> Iterator[Remedy]:
    """Yield what a user can change. The algorithm of sums is not a choice of the user."""

    def remedy(change: str, exchanged: UpdateExchange, times: int = 1) -> Remedy:
        computed = times * computing
        waiting = exchanged.seconds(computed, processes, link)
        return Remedy(change, computed / (computed + waiting))

    yield remedy("twice the accumulation", own, 2)
    yield remedy("bfloat16 weights", own.scaled(0.5))
    if len(own.buckets) > len(own.joined().buckets):
        yield remedy("larger buckets", own.joined())
    if own.gathered:
        yield remedy("undivided optimizer state", replace(own, gathered=()))


_UNITS = {
    "latency": ({"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "20us"),
    "bandwidth": (
        {f"{k}{b}": factor * of for k, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
         for b, of in (("b", 1 / 8), ("bit", 1 / 8), ("B", 1.0))}, "100Gb",
    ),
}  # fmt: skip


def link_of(latency: object, bandwidth: object) -> Link:
    """Return the link for two texts, such as 20us and 100Gb, or for seconds and bytes per
    second.
    """
    return Link(_quantity("latency", latency), _quantity("bandwidth", bandwidth))


def _quantity(name: str, given: object) -> float:
    units, example = _UNITS[name]
    value = -1.0
    if isinstance(given, int | float) and not isinstance(given, bool):
        value = float(given)
    elif isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+?)(?:/s|ps)?\s*", given)
        if match is not None and match[2] in units:
            value = float(match[1]) * units[match[2]]
    if not 0 <= value < math.inf or (name == "bandwidth" and not value):
        plain = "seconds one way" if name == "latency" else "bytes a second"
        raise InvalidValue(
            f"An estimate for several processes needs the {name} of the link",
            got=f"{name}={given!r}",
            fix=(
                f'for example {name}="{example}"; units are {", ".join(units)}, and a number '
                f"without a unit is {plain}"
            ),
        )
    return value


def counts_of(given: object) -> tuple[int, ...]:
    """Return the numbers of processes, sorted."""
    counts = (
        tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    )
    if not all(type(each) is int and each > 0 for each in counts):
        raise InvalidValue(
            "Numbers of processes must be integers of at least 1", got=f"processes={given!r}",
            fix="for example processes=(8, 64, 1024)",
        )  # fmt: skip
    return tuple(sorted(set(counts)))


def shown(curve: Mapping[str, Any]) -> Iterator[TextPart]:
    """Yield the lines and tables to show."""
    yield (
        "Estimate for more processes, each with a batch of this size and its own machine: "
        f"{time_text(curve['computing'])} per call, {curve['source']}; "
        f"{size_text(curve['bytes'])} of gradients per update; a link with "
        f"{time_text(curve['latency'])} and {8e-9 * curve['bandwidth']:g} Gb/s (nothing was "
        "run)"
    )
    head = ["processes", "a call", "exchanging", "efficiency", "bound by"]
    yield [
        [*head, "as a tree", "hierarchical", "what would help, with the resulting efficiency"],
        *(
            [
                str(row["processes"]),
                *(time_text(row[name]) for name in ("seconds", "exchanging")),
                f"{row['efficiency']:.1%}", row["bound"],
                *(time_text(row[name]) for name in ("tree", "hierarchical")),
                ", ".join(f"{r['change']} {r['efficiency']:.1%}" for r in row["remedies"]),
            ]
            for row in curve["rows"]
        ),
    ]  # fmt: skip
