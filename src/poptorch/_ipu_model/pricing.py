"""Turn a staged program into an Estimate: time, memory, the largest part, and the effect
of guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace

from torch import fx

from .._base import source
from .._ir.block_labels import StagePass, label_of, line_of
from .._ir.slots import Kind
from . import chip_memory
from .chip_memory import ChipMemory, memory_of
from .constants import ERROR_BANDS, Constants, Mark
from .cycles import Cost, cost
from .estimate import Estimate
from .parts import ChipEstimate, Culprit, Guess, LiveTensor, OperatorEstimate, verdict
from .product_planner import peak_macs
from .simulate import PassPrice, Timeline, named, simulate
from .subject import Subject

_TRIED = 1.1
_MATTERS = 0.005
_HOST_BOUND = 1 / 3
_SHOWN = 12


def price(subject: Subject, system: str, guesses: bool) -> Estimate:
    timeline = simulate(subject)
    memories = memory_of(subject, timeline.prices)
    seconds, cycles = _duration(subject, timeline)
    names = _Names(subject, timeline.prices)
    call = seconds * subject.clock - cycles
    chips = tuple(
        _chip(subject, chip, spent, call, memories[chip], names)
        for chip, spent in sorted(timeline.by_chip.items())
    )
    kind, used = subject.chip.kind, len(chips) * subject.replicas
    flops = subject.flops * subject.spec.loops.steps * subject.replicas
    peak = 2 * peak_macs(kind, *_best_type(subject)) * kind.tiles * subject.clock * used
    runs = _runs(subject)
    operators = [
        replace(each, chip=subject.staged.workload.chip_of(stage_pass), runs=runs[stage_pass])
        for stage_pass, own in timeline.prices.items()
        for each in own.inside.operators
    ]
    weighed: tuple[Guess, ...] = ()
    if guesses:
        weighed = (*_guesses(subject, seconds, chips), *_unknown(subject, timeline))
    bound, culprit = _bound(chips), names.culprit(chips, memories)
    sort = _kind(bound, operators)
    return Estimate(
        name=subject.name,
        system=system,
        kind=sort,
        fits=all(chip.bytes <= chip.limit for chip in chips),
        verdict=verdict(culprit.over),
        culprit=culprit,
        seconds=seconds,
        cycles=cycles,
        items_per_second=subject.rows / seconds,
        share_of_peak=flops / seconds / peak,
        bound=bound,
        chips=chips,
        replicas=subject.replicas,
        operators=tuple(sorted(operators, key=lambda row: -row.cycles)),
        schedule=timeline.actions,
        runs=subject.flushes,
        guesses=weighed,
        advice=(),
        error_band=ERROR_BANDS[sort],
        clock=subject.clock,
    )


def _duration(subject: Subject, timeline: Timeline) -> tuple[float, float]:
    """Return the seconds of a call with the host's part, and the cycles of the chips."""
    cycles, c = timeline.cycles * subject.flushes, subject.constants
    return cycles / subject.clock + c.call_seconds + c.python_seconds, cycles


def _chip(
    subject: Subject, chip: int, spent: Cost, call: float, held: ChipMemory, names: _Names
) -> ChipEstimate:
    whole, kind = spent.times(subject.flushes).plus(Cost(call=call)), subject.chip.kind
    return ChipEstimate(
        chip, whole.total - whole.bubble - whole.call, named(whole), dict(held.always),
        dict(held.peak), "" if held.at is None else str(held.at), kind.tiles * kind.tile_bytes,
        held.live, tuple(map(round, held.tiles)), names.live(held), names.moments(held),
    )  # fmt: skip


def _bound(chips: tuple[ChipEstimate, ...]) -> dict[str, float]:
    totals = Counter[str]()
    for chip in chips:
        totals.update(chip.parts)
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()}


def _kind(bound: Mapping[str, float], operators: Iterable[OperatorEstimate]) -> str:
    """Return the kind of program, by the host's share and then by the type of most products."""
    if bound["host call"] + bound["host link"] > _HOST_BOUND:
        return "host-bound"
    flops = Counter[bool]()
    for each in operators:
        flops["convolution" in each.name] += each.flops * each.runs
    return "convolution" if flops[True] > flops[False] else "transformer"


def _best_type(subject: Subject) -> tuple[int, bool]:
    made = [
        product
        for each in subject.passes.values()
        for work in each.works(subject.chip.half_partials).values()
        for product in work.all_products
    ]
    size = min((product.itemsize for product in made), default=4)
    return size, any(product.half_partials for product in made)


def _guesses(
    subject: Subject, seconds: float, chips: tuple[ChipEstimate, ...]
) -> tuple[Guess, ...]:
    """Return the guesses on which the result depends, by trying values that are 10 % larger."""
    size = max(chip.bytes for chip in chips)
    guesses = []
    for constant in fields(Constants):
        name, meta = constant.name, constant.metadata
        if meta["mark"] is not Mark.GUESS:
            continue
        value = getattr(subject.constants, name)
        changed = subject.with_constants(**{name: value * _TRIED})
        timeline = simulate(changed)
        slower = _duration(changed, timeline)[0] / seconds - 1
        memories = memory_of(changed, timeline.prices)
        larger = max(each.bytes for each in memories.values()) / size - 1
        share = max(abs(slower), abs(larger)) / (_TRIED - 1)
        if share > _MATTERS:
            guesses.append(Guess(name, value, meta["unit"], meta["source"], min(1.0, share)))
    return tuple(sorted(guesses, key=lambda guess: -guess.share))


def _runs(subject: Subject) -> dict[StagePass, int]:
    """Return how many times a call runs each pass."""
    cells = subject.staged.schedule.cells()
    once = Counter(action.stage_pass for _, _, action in cells if action.traffic is None)
    return {stage_pass: count * subject.flushes for stage_pass, count in once.items()}


def _unknown(subject: Subject, timeline: Timeline) -> Iterator[Guess]:
    """Yield the operators without known costs, with their share of the chips' work."""
    spent: dict[str, float] = {}
    for each, often in _runs(subject).items():
        for work in subject.passes[each].works(subject.chip.half_partials).values():
            if work.unknown:
                cycles = cost(work, subject.chip_of(each)).total * often
                spent[work.unknown] = spent.get(work.unknown, 0.0) + cycles
    one_run = sum(parts.total - parts.bubble for parts in timeline.by_chip.values())
    busy = one_run * subject.flushes
    for name, cycles in spent.items():
        why = "unknown operator, estimated as an addition"
        yield Guess(f"operator {name}", 1.0, "addition/element", why, min(1.0, cycles / busy))


_CATEGORY = {
    Kind.OPTSTATE: chip_memory.OPTIMIZER, Kind.ACCUM: chip_memory.ACCUMULATORS,
    Kind.VALUE: chip_memory.ACTIVATIONS, Kind.BATCH: chip_memory.ACTIVATIONS,
}  # fmt: skip


class _Names:
    def __init__(self, subject: Subject, prices: Mapping[StagePass, PassPrice]) -> None:
        self._prices, self._slots = prices, subject.staged.slots()
        self._makers: dict[str, fx.Node] = {}
        self._readers: dict[str, fx.Node] = {}
        for graph in subject.staged.graphs.values():
            for slot, node in graph.results:
                if slot.kind is Kind.VALUE and node.op == "call_function":
                    self._makers.setdefault(slot.key, node)
            for node, slot in graph.arguments.items():
                if node.users:
                    self._readers.setdefault(slot.key, next(iter(node.users)))
                    if slot.kind is Kind.PARAM:
                        self._readers.setdefault(slot.weight, next(iter(node.users)))

    def culprit(self, chips: tuple[ChipEstimate, ...], held: Mapping[int, ChipMemory]) -> Culprit:
        fullest = max(chips, key=lambda chip: chip.bytes)
        real = {k: v for k, v in fullest.peak.items() if k != chip_memory.GAPS}
        category = max(real, key=lambda name: real[name])
        largest = self._largest(held[fullest.chip], category)
        return Culprit(
            fullest.chip, fullest.peak_at, category, largest.name, largest.module, largest.line,
            real[category],
            100 * (fullest.bytes / fullest.limit - 1),
        )  # fmt: skip

    def live(self, held: ChipMemory) -> tuple[LiveTensor, ...]:
        sizes = {**held.state, **held.waiting}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
        return tuple(self._tensor(key, sizes[key]) for key in largest)

    def moments(self, held: ChipMemory) -> dict[str, LiveTensor]:
        """Name the largest tensor at the fullest moment of each pass, and at rest."""
        return {
            str(each or ""): self._largest(replace(held, at=action, waiting=waiting))
            for each, (action, waiting) in held.moments.items()
        }

    def _tensor(self, key: str, size: float) -> LiveTensor:
        return LiveTensor(key, self._category(key), size, *_place(self._node_of(key)))

    def _category(self, key: str) -> str:
        return _CATEGORY.get(self._slots[key].kind, chip_memory.WEIGHTS)

    def _largest(self, held: ChipMemory, category: str = "") -> LiveTensor:
        """Return the largest tensor, in one category or in all; in a running pass, of its fullest
        operator.
        """
        sizes = {
            key: size
            for key, size in {**held.state, **held.waiting}.items()
            if not category or self._category(key) == category
        }
        key = max(sizes, key=lambda name: sizes[name], default="")
        own = None if held.at is None else self._prices[held.at.stage_pass].inside
        if own is not None and own.fullest is not None:
            inside = {chip_memory.TEMPORARY: own.temporary, chip_memory.ACTIVATIONS: own.values}
            kind = category or max(inside, key=lambda name: inside[name])
            if inside.get(kind, 0.0) > sizes.get(key, 0.0):
                return LiveTensor(own.fullest.name, kind, inside[kind], *_place(own.fullest))
        return self._tensor(key, sizes[key]) if key else LiveTensor("", category, 0.0, "", "")

    def _node_of(self, key: str) -> fx.Node | None:
        if key in self._makers:
            return self._makers[key]
        return self._readers.get(self._slots[key].weight) or self._readers.get(key)


def _place(node: fx.Node | None) -> tuple[str, str]:
    if node is None:
        return "", ""
    line = line_of(node)
    return label_of(node).path, source.describe(*line) if line else ""
