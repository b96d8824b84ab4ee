"""Define ``Plan``: what a backend compiles, a Program with its placement, settings and schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._base.errors import one_line
from .._base.tables import html_text, size_text, table, time_text
from .block_labels import (
    Direction,
    PlacedStage,
    StagePass,
    pass_of,
    product_settings,
    reader_passes,
    stage_passes,
)
from .graph import Graph, slots_of
from .program import Program
from .schedule import Action, Schedule, Workload
from .slots import RETURNED, Kind, Slot
from .spec import Location, Spec, Strategy

RESULTS = (*RETURNED, Kind.ANCHOR, Kind.BATCH)
PER_MICRO_BATCH = (Kind.VALUE, Kind.BATCH)  # kinds with separate tensors for every micro-batch

_WIDEST = 24


@dataclass(frozen=True, eq=False)
class Layout:
    """A placed micro graph. The label of a node contains its pass."""

    stages: tuple[PlacedStage, ...]  # in forward order; never empty
    depth: int  # number of forward pipeline stages for the strategy's rules: device switches + 1
    chips: int  # devices for one replica: highest index + 1
    reserved: int  # devices for all replicas of this process, rounded if that was allowed
    graph: Graph = field(metadata={"saved": False})


@dataclass(frozen=True)
class Transfer:
    value: Slot  # with the shape for one micro-batch
    source: StagePass  # the pass that computes it
    target: int  # the chip that receives it


@dataclass(frozen=True, eq=False)
class Staged:
    """A program that is divided into one graph per stage pass, and the values that chips exchange.

    Inputs are state and micro-batches, which are on the pass's own chip, and ``value.*``: results
    of other passes for the same micro-batch. Outputs are results, new state, and ``value.*``.
    """

    graphs: Mapping[StagePass, Graph]  # in the order of the passes
    homes: Mapping[str, tuple[int, ...]]  # chips that have each state tensor, by slot key
    transfers: tuple[Transfer, ...]
    workload: Workload
    schedule: Schedule
    parts: Mapping[int, int]  # process of each chip
    # approximate seconds; empty if all are equal
    work: Mapping[StagePass, float] = field(default_factory=dict)

    def slots(self) -> dict[str, Slot]:
        return slots_of(self.graphs.values())

    def part_of(self, stage_pass: StagePass) -> int:
        return self.parts[self.workload.chip_of(stage_pass)]

    @property
    def bubble(self) -> float:
        """The share of time in which processes wait, if updates and messages take no time.

        A process does not wait for the end of a column, but only for what its next pass reads.
        """
        ends: dict[Action, float] = {}
        free = dict.fromkeys(self.parts.values(), 0.0)
        done = 0.0
        for _, _, action in self.schedule.cells():
            if action.stage_pass.is_update:
                continue
            takes = 0.0 if action.traffic else self.work.get(action.stage_pass, 1.0)
            done += takes
            needs = () if action.traffic else self.workload.needs.get(action.stage_pass, ())
            part = self.part_of(action.stage_pass)
            ready = [ends[Action(need, action.micro_batch)] for need in needs]
            free[part] = ends[action] = max([free[part], *ready]) + takes
        return 1 - done / (len(free) * max(free.values()))

    def holders(self, key: str) -> list[int]:
        return sorted({self.parts[chip] for chip in self.homes[key]})

    def last_readers(self) -> dict[tuple[int, str], StagePass]:
        return {
            (self.workload.chip_of(each), slot.key): each
            for each, graph in self.graphs.items()
            for slot in graph.inputs
            if slot.kind in PER_MICRO_BATCH
        }

    def forgotten(self) -> dict[StagePass, list[str]]:
        forgotten: dict[StagePass, list[str]] = defaultdict(list)
        for (_, key), stage_pass in self.last_readers().items():
            forgotten[stage_pass].append(key)
        return forgotten

    def targets(self) -> dict[str, list[int]]:
        targets: dict[str, list[int]] = defaultdict(list)
        for transfer in self.transfers:
            targets[transfer.value.key].append(transfer.target)
        return targets

    def makers(self) -> dict[str, int]:
        return {
            slot.key: self.part_of(each)
            for each, graph in self.graphs.items()
            for slot in graph.outputs
            if slot.kind in RESULTS
        }


def values_read(graph: Graph) -> frozenset[str]:
    return frozenset(slot.key for slot in graph.inputs if slot.kind is Kind.VALUE)


def values_written(graph: Graph) -> frozenset[str]:
    return frozenset(slot.key for slot in graph.outputs if slot.kind is Kind.VALUE)


@dataclass(frozen=True, eq=False)
class Plan:
    program: Program
    spec: Spec
    layout: Layout
    staged: Staged | None = field(default=None, metadata={"saved": False})
    # a line of text; empty if nothing runs it
    tier: str = field(default="", metadata={"saved": False})
    libraries: tuple[str, ...] = field(default=(), metadata={"saved": False})
    # the program that runs instead
    prepared: Program | None = field(default=None, metadata={"saved": False})
    sizes: str = field(default="", metadata={"saved": False})  # a line: which sizes it is for
    # a line: which numbers of the optimizer need another program if they change
    numbers: str = field(default="", metadata={"saved": False})

    def describe(self) -> str:
        program = self.prepared or self.program
        graphs = [*([program.prepare] if program.prepare else []), *program.graphs.values()]
        return "\n\n".join(map(str, (program, *graphs)))

    def __str__(self) -> str:
        name = self.spec.runtime.model_name
        lines = [f"model {one_line(name)}"] if name else []  # the name may come from anybody's file
        lines += [self.tier] if self.tier else []
        lines += _indented(self.libraries)
        lines += [line for line in (self.sizes, self.numbers) if line]
        lines += [str(self.prepared or self.program), _headline(self), *_indented(_stages(self))]
        if self.spec.target.link is not None:
            latency, bandwidth = self.spec.target.link
            speed = f"{time_text(latency)} one way, {8e-9 * bandwidth:.3g} Gb/s"
            lines += [f"between machines, as measured: {speed}"]
        lines += ["homes", *_indented(_locations(self))]
        products = product_settings(self.layout.graph.module.graph)
        if products:
            lines += ["products", *_indented(f"{at}: {what}" for at, what in products.items())]
        if self.staged is not None:
            lines += ["sent between chips", *_indented(_sent(self.staged))]
            moved = list(_moved(self.staged))
            if moved:
                lines += ["streaming memory", *_indented(moved)]
            lines += [_schedule_line(self.staged), *_indented(_grid(self.staged.schedule))]
            lines += _indented(_legend(self.staged))
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        pictures = [] if self.staged is None else [self.staged.schedule.to_svg()]
        return "".join([html_text(str(self)), *pictures])


@dataclass(frozen=True)
class Report:
    backend: str
    state_bytes: int  # bytes of the tensors on the device
    nodes: tuple[tuple[str, int], ...]  # number of operators in each graph, by name
    compile_seconds: float
    next_backend: str | None = None  # takes over as soon as it has compiled the program
    ready: tuple[str, ...] = ()  # the graphs that it runs already
    threads: str = ""  # number of threads, and the reason
    libraries: tuple[str, ...] = ()  # lines of text: which library computes the large products
    prepared: Program | None = None  # the program that runs instead, if it is another one

    @property
    def tier(self) -> str:
        if self.next_backend is None:
            return " ".join(filter(None, (f"runs on the {self.backend} backend", self.threads)))
        part = f", {' and '.join(self.ready)} on {self.next_backend}," if self.ready else ""
        return f"runs on the {self.backend} backend{part} until {self.next_backend} has compiled it"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _headline(plan: Plan) -> str:
    layout, placement = plan.layout, plan.spec.placement
    strategy = placement.strategy.replace("_", " ")
    if placement.strategy is Strategy.PIPELINED:
        strategy += ", interleaved (1F1B)" if placement.interleaved else ", grouped"
    parts = [
        f"{_count(len(layout.stages), 'stage')} on {_count(layout.chips, 'IPU')}",
        _count(plan.spec.loops.replicas, "replica"),
        f"{_count(layout.reserved, 'IPU')} reserved",
    ]
    return f"{strategy} {'training' if plan.spec.training else 'inference'}: {', '.join(parts)}"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _stages(plan: Plan) -> list[str]:
    layout, training = plan.layout, plan.spec.training
    columns = {
        "stage": [str(index) for index in range(len(layout.stages))],
        "ipu": [str(stage.chip) for stage in layout.stages],
    }
    if plan.spec.placement.phased:
        columns["phase"] = [str(stage.phase) for stage in layout.stages]
    if plan.spec.target.parts > 1 and plan.staged is not None:
        columns["process"] = [str(plan.staged.parts[stage.chip]) for stage in layout.stages]
    columns["blocks"] = [stage.name for stage in layout.stages]
    columns["operators"] = _operators(layout.graph, len(layout.stages), training)
    columns["weights"] = _weights(layout.graph, len(layout.stages))
    if plan.staged is not None and training:
        columns["kept per micro-batch"] = _kept(plan.staged)
    return table([list(columns), *zip(*columns.values(), strict=True)])


def _operators(graph: Graph, stages: int, training: bool) -> list[str]:
    counts = Counter(map(pass_of, graph.module.graph.nodes))
    by_stage: list[list[str]] = [[] for _ in range(stages)]
    for stage_pass in sorted(stage_passes(stages, training)):
        by_stage[stage_pass.stage].append(str(counts[stage_pass]))
    return [" + ".join(numbers) for numbers in by_stage]


def _weights(graph: Graph, stages: int) -> list[str]:
    sizes = [0] * stages
    for node, slot in graph.arguments.items():
        readers = reader_passes(node)
        if slot.kind is Kind.PARAM and readers:
            sizes[min(reader.stage for reader in readers)] += slot.bytes
    return [size_text(size) for size in sizes]


def _kept(staged: Staged) -> list[str]:
    forward = {
        slot.key
        for stage_pass, graph in staged.graphs.items()
        if stage_pass.direction is Direction.FORWARD
        for slot in (*graph.inputs, *graph.outputs)
        if slot.kind in (Kind.VALUE, Kind.BATCH)
    }
    backward = (
        staged.graphs[StagePass(index, Direction.BACKWARD)]
        for index in range(len(staged.workload.stages))
    )
    return [size_text(sum(s.bytes for s in g.inputs if s.key in forward)) for g in backward]


def _locations(plan: Plan) -> list[str]:
    locations = plan.spec.locations
    lines = [f"{name}: {_location(location)}" for name, location in locations.named.items()]
    return lines + ([f"I/O tiles: {locations.io_tiles}"] if locations.io_tiles else [])


def _location(location: Location) -> str:
    words = ["on chip" if location.on_chip else "in streaming memory"]
    words += ["sharded over replicas"] if location.sharded else []
    io_tiles = (("loaded", location.load_by_io_tiles), ("stored", location.store_by_io_tiles))
    words += [f"{verb} by I/O tiles" for verb, used in io_tiles if used]
    return ", ".join(words)


def _sent(staged: Staged) -> list[str]:
    rows: dict[tuple[StagePass, int, int], list[Slot]] = {}
    for transfer in staged.transfers:
        chip = staged.workload.chip_of(transfer.source)
        rows.setdefault((transfer.source, chip, transfer.target), []).append(transfer.value)
    if not rows:
        return ["nothing"]
    lines = [["after", "from", "to", "tensors", "bytes", "per"]]
    for (source, chip, to), values in rows.items():
        size = size_text(sum(slot.bytes for slot in values))
        per = _period(staged) if source.is_update else "micro-batch"
        lines.append([str(source), f"ipu {chip}", f"ipu {to}", str(len(values)), size, per])
    return table(lines)


def _moved(staged: Staged) -> Iterator[str]:
    slots, streaming = staged.slots(), staged.workload.streaming
    for verb, lists in (("loaded", streaming.loads), ("stored", streaming.stores)):
        size = sum(
            slots[key].bytes * (1 if stage_pass.is_update else staged.workload.micro_batches)
            for stage_pass, keys in lists.items()
            for key in keys
        )
        if size:
            yield f"{verb}: {size_text(size)} per {_period(staged)}"


def _period(staged: Staged) -> str:
    return "update" if staged.workload.training else "call"


def _schedule_line(staged: Staged) -> str:
    schedule = staged.schedule
    micro_batches = _count(staged.workload.micro_batches, "micro-batch")
    return (
        f"schedule of one {_period(staged)}: {micro_batches} in "
        f"{_count(schedule.columns, 'column')}, bubble {schedule.bubble:.0%}{_waiting(staged)}"
    )


def _waiting(staged: Staged) -> str:
    processes = len({*staged.parts.values()})
    return f"; {processes} processes wait {staged.bubble:.0%} of the time" if processes > 1 else ""


def _grid(schedule: Schedule) -> list[str]:
    if schedule.columns <= _WIDEST:
        return str(schedule).splitlines()
    shown = Schedule({chip: row[:_WIDEST] for chip, row in schedule.rows.items()})
    width = max(map(len, str(shown).splitlines()))
    return [f"{line:<{width}} ..." for line in str(shown).splitlines()]


def _legend(staged: Staged) -> list[str]:
    letters = {
        "F": "1F0: forward of stage 1, micro-batch 0",
        "B": "1B0: backward",
        "U": "0U1: update of chip 0, round 1",
        "L": "L, S: load from, store to streaming memory",
    }
    used = {letter for _, _, action in staged.schedule.cells() for letter in str(action)}
    return ["; ".join(text for letter, text in letters.items() if letter in used)]
