"""A staged program -> Estimate: time and memory, the culprit named, guesses weighed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from .._base import source
from .constants import Constants, Mark
from .cycles import cost
from .estimate import (
    ERROR_BAND,
    Action,
    ChipEstimate,
    Estimate,
    Guess,
    OperatorEstimate,
)
from .memory import ChipMemory, memory_of
from .naming import Names
from .priced import Subject
from .products import peak_macs
from .simulate import Parts, Timeline, simulate

NAMES = {"host": "host link", "streaming": "streaming memory", "call": "host call"}
_TRIED = 1.1
_MATTERS = 0.005


def price(subject: Subject, system: str, guesses: bool = True) -> Estimate:
    """Return what a staged program costs.

    Args:
        subject: the program and what it is priced for.
        system: what the estimate calls that.
        guesses: find out how much each guess decides.
    """
    timeline = simulate(subject)
    memories = memory_of(subject, timeline.passes)
    seconds, cycles = _duration(subject, timeline)
    kind = subject.chip.kind
    clock = kind.clock_mhz * 1e6
    call = seconds * clock - cycles
    limit = kind.tiles * kind.tile_bytes
    names = Names(subject, timeline.passes)
    chips = tuple(
        _chip(names, chip, timeline.by_chip[chip], subject.flushes, call, memories[chip], limit)
        for chip in sorted(timeline.by_chip)
    )
    used = len(chips) * subject.fabric.replicas
    flops = subject.flops * subject.spec.loops.steps * subject.fabric.replicas
    peak = 2 * peak_macs(kind, *_best_type(subject)) * kind.tiles * clock * used
    return Estimate(
        system=system,
        fits=all(chip.bytes <= chip.limit for chip in chips),
        culprit=names.culprit(chips, memories),
        seconds=seconds,
        cycles=cycles,
        items_per_second=subject.rows / seconds,
        share_of_peak=flops / seconds / peak,
        bound=_bound(chips),
        chips=chips,
        replicas=subject.fabric.replicas,
        operators=_operators(subject, timeline),
        schedule=tuple(
            Action(cell.chip, str(cell.action), cell.start, _plain(cell.parts), cell.sent)
            for cell in timeline.cells
        ),
        runs=subject.flushes,
        guesses=(*_guesses(subject, seconds, chips), *_unknown(subject, timeline))
        if guesses
        else (),
        advice=(),
        error_band=ERROR_BAND,
        clock=clock,
    )


def device_seconds(subject: Subject) -> float:
    """Return the seconds of a call on the chips, without everything else that ``price`` finds."""
    return simulate(subject).cycles * subject.flushes / (subject.chip.kind.clock_mhz * 1e6)


def _duration(subject: Subject, timeline: Timeline) -> tuple[float, float]:
    """Seconds of a call with the host's part, and cycles of the chips."""
    cycles = timeline.cycles * subject.flushes
    c = subject.chip.constants
    seconds = cycles / (subject.chip.kind.clock_mhz * 1e6)
    return seconds + c.call_seconds + c.python_seconds, cycles


def _plain(parts: Parts) -> dict[str, float]:
    return {NAMES.get(name, name): value for name, value in asdict(parts).items() if value}


def _chip(
    names: Names, chip: int, parts: Parts, runs: int, call: float, held: ChipMemory, limit: int
) -> ChipEstimate:
    whole = Parts(call=call).plus(parts, runs)
    named = {NAMES.get(each.name, each.name): getattr(whole, each.name) for each in fields(whole)}
    return ChipEstimate(
        chip, whole.total - whole.bubble - whole.call, named, dict(held.always), dict(held.peak),
        "" if held.at is None else str(held.at), limit, held.live,
        tuple(map(round, held.tiles)), names.live(held),
    )  # fmt: skip


def _bound(chips: tuple[ChipEstimate, ...]) -> dict[str, float]:
    totals = Counter[str]()
    for chip in chips:
        totals.update(chip.parts)
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()}


def _best_type(subject: Subject) -> tuple[int, bool]:
    """The narrowest operands of products, and whether sums are kept in 16 bits."""
    made = [
        product
        for each in subject.staged.graphs
        for work in subject.known.works(each, subject.chip.half_partials).values()
        for product in work.all_products
    ]
    size = min((product.itemsize for product in made), default=4)
    return size, any(product.half_partials for product in made)


def _operators(subject: Subject, timeline: Timeline) -> tuple[OperatorEstimate, ...]:
    workload = subject.staged.workload
    rows = [
        OperatorEstimate(
            str(stage_pass), workload.chip_of(stage_pass), each.name, each.module,
            source.describe(*each.line) if each.line else "", each.count,
            each.cost.compute, each.cost.exchange, each.cost.sync, each.flops,
        )
        for stage_pass, price in timeline.passes.items()
        for each in price.inside.operators
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.cycles))


def _guesses(
    subject: Subject, seconds: float, chips: tuple[ChipEstimate, ...]
) -> tuple[Guess, ...]:
    """Which guesses the result depends on: what changes in proportion if they do."""
    known = {each.name: each.metadata for each in fields(Constants)}
    size = max(chip.bytes for chip in chips)
    guesses = []
    for name in subject.chip.constants.marked(Mark.GUESS):
        value = getattr(subject.chip.constants, name)
        changed = subject.with_constants(**{name: value * _TRIED})
        timeline = simulate(changed)
        slower = _duration(changed, timeline)[0] / seconds - 1
        bytes_then = max(
            sum(each.peak.values()) for each in memory_of(changed, timeline.passes).values()
        )
        share = max(abs(slower), abs(bytes_then / size - 1)) / (_TRIED - 1)
        if share > _MATTERS:
            meta: Mapping[str, Any] = known[name]
            guesses.append(Guess(name, value, meta["unit"], meta["source"], min(1.0, share)))
    return tuple(sorted(guesses, key=lambda guess: -guess.share))


def _unknown(subject: Subject, timeline: Timeline) -> Iterator[Guess]:
    """Yield the operators that nothing is known of, with what they take of the chips' work."""
    runs = Counter(c.action.stage_pass for c in timeline.cells if c.action.traffic is None)
    spent = Counter[str]()
    for each, often in runs.items():
        works = subject.known.works(each, subject.chip.half_partials).values()
        for work in works:
            if work.unknown:
                spent[work.unknown] += cost(work, subject.chip_of(each)).total * often  # type: ignore[assignment]
    busy = sum(parts.total - parts.bubble for parts in timeline.by_chip.values())
    for name, cycles in spent.items():
        why = "nothing is known of it; taken for an addition"
        yield Guess(f"operator {name}", 1.0, "addition/element", why, min(1.0, cycles / busy))
