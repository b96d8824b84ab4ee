"""A staged program -> Estimate: time and memory, the culprit named, guesses weighed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import fx

from .._base import source
from .._ir.blocks import label_of, line_of
from .._ir.slot import Kind
from . import memory
from .constants import Constants, Mark
from .estimate import (
    ERROR_BAND,
    Action,
    ChipEstimate,
    Culprit,
    Estimate,
    Guess,
    OperatorEstimate,
)
from .memory import ChipMemory, memory_of
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
    chips = tuple(
        _chip(chip, timeline.by_chip[chip], subject.flushes, call, memories[chip], limit)
        for chip in sorted(timeline.by_chip)
    )
    used = len(chips) * subject.fabric.replicas
    flops = subject.flops * subject.spec.loops.steps * subject.fabric.replicas
    peak = 2 * peak_macs(kind, *_best_type(subject)) * kind.tiles * clock * used
    culprit = _culprit(subject, chips, memories, timeline)
    return Estimate(
        system=system,
        fits=all(chip.bytes <= chip.limit for chip in chips),
        culprit=culprit,
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
        guesses=_guesses(subject, seconds, chips) if guesses else (),
        advice=(),
        error_band=ERROR_BAND,
        clock=clock,
    )


def rate(subject: Subject) -> float:
    """Return the samples per second, without everything else that ``price`` finds out."""
    return subject.rows / _duration(subject, simulate(subject))[0]


def _duration(subject: Subject, timeline: Timeline) -> tuple[float, float]:
    """Seconds of a call with the host's part, and cycles of the chips."""
    cycles = timeline.cycles * subject.flushes
    c = subject.chip.constants
    seconds = cycles / (subject.chip.kind.clock_mhz * 1e6)
    return seconds + c.call_seconds + c.python_seconds, cycles


def _plain(parts: Parts) -> dict[str, float]:
    return {NAMES.get(name, name): value for name, value in asdict(parts).items() if value}


def _chip(
    chip: int, parts: Parts, runs: int, call: float, held: ChipMemory, limit: int
) -> ChipEstimate:
    whole = Parts(call=call).plus(parts, runs)
    named = {NAMES.get(each.name, each.name): getattr(whole, each.name) for each in fields(whole)}
    return ChipEstimate(
        chip, whole.total - whole.bubble - whole.call, named, dict(held.always), dict(held.peak),
        "" if held.at is None else str(held.at), limit, held.live,
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
        for product in work.products
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


def _culprit(
    subject: Subject,
    chips: tuple[ChipEstimate, ...],
    memories: Mapping[int, ChipMemory],
    timeline: Timeline,
) -> Culprit:
    """What takes most on the fullest chip."""
    fullest = max(chips, key=lambda chip: chip.bytes)
    held = memories[fullest.chip]
    real = {k: v for k, v in fullest.peak.items() if k != memory.GAPS}
    category = max(real, key=lambda name: real[name])
    tensor, node = _largest(subject, category, held, timeline)
    module = label_of(node).module if node is not None else ""
    line = line_of(node) if node is not None else None
    return Culprit(
        fullest.chip, fullest.peak_at, category, tensor, module,
        source.describe(*line) if line else "", real[category],
        100 * (fullest.bytes / fullest.limit - 1),
    )  # fmt: skip


def _largest(
    subject: Subject, category: str, held: ChipMemory, timeline: Timeline
) -> tuple[str, fx.Node | None]:
    """The largest tensor of a category, and an operator that makes or reads it."""
    kinds = {
        memory.WEIGHTS: (Kind.PARAM, Kind.BUFFER, Kind.CONSTANT),
        memory.OPTIMIZER: (Kind.OPTSTATE,),
        memory.ACCUMULATORS: (Kind.ACCUM,),
        memory.ACTIVATIONS: (Kind.VALUE, Kind.BATCH),
    }.get(category)
    if kinds is None:
        at = held.at and timeline.passes[held.at.stage_pass].inside.transient.at
        return (at.name, at) if at and category == memory.TEMPORARY else ("", None)
    graphs = subject.staged.graphs
    of_kind = {s.key for g in graphs.values() for s in (*g.inputs, *g.outputs) if s.kind in kinds}
    sizes = {k: v for k, v in {**held.state, **held.waiting}.items() if k in of_kind}
    if category == memory.ACTIVATIONS and held.at is not None:
        transient = timeline.passes[held.at.stage_pass].inside.transient
        if transient.at is not None and transient.values > max(sizes.values(), default=0):
            return transient.at.name, transient.at
    if not sizes:
        return "", None
    key = max(sizes, key=lambda name: sizes[name])
    return key, _node_of(subject, key)


def _node_of(subject: Subject, key: str) -> fx.Node | None:
    """An operator that makes a value, or else the first that reads it or its weight."""
    weight = {s.key: s.weight for g in subject.staged.graphs.values() for s in g.inputs}.get(key)
    for graph in subject.staged.graphs.values():
        for slot, node in zip(graph.outputs, graph.returned, strict=True):
            if slot.key == key and slot.kind is Kind.VALUE and node.op == "call_function":
                return node
    for graph in subject.staged.graphs.values():
        for slot, node in zip(graph.inputs, graph.placeholders, strict=True):
            same = slot.key == key or (weight and slot.kind is Kind.PARAM and slot.weight == weight)
            if same and node.users:
                return next(iter(node.users))
    return None


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
