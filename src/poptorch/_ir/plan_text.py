"""A Plan as text: program, stages and chips, what rests where, what is sent, the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .blocks import pass_of
from .graph import Graph
from .placement import Location, Strategy
from .plan import Plan
from .schedule import Schedule
from .slot import Kind, Slot
from .stage_pass import Direction, StagePass, stage_passes
from .staged import Staged

_WIDEST = 24
"""Columns of the schedule that are shown."""

_UNITS = ("B", "KiB", "MiB", "GiB")


def plan_text(plan: Plan) -> str:
    """Return everything about a plan that is worth reading, as lines."""
    name = plan.spec.runtime.model_name
    lines = [f"model {name}"] if name else []
    lines += [plan.tier] if plan.tier else []
    lines += [str(plan.program), _headline(plan), *_indented(_stages(plan))]
    lines += ["homes", *_indented(_locations(plan))]
    if plan.staged is not None:
        lines += ["sent between chips", *_indented(_sent(plan.staged))]
        moved = list(_moved(plan.staged))
        if moved:
            lines += ["streaming memory", *_indented(moved)]
        lines += [_rhythm(plan.staged), *_indented(_grid(plan.staged.schedule))]
        lines += _indented(_legend(plan.staged))
    return "\n".join(lines)


def size_text(count: float) -> str:
    """Return a number of bytes for people: ``1.5 KiB``."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} B"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
    """For every stage ``forward + backward``."""
    counts = Counter(map(pass_of, graph.module.graph.nodes))
    by_stage: list[list[str]] = [[] for _ in range(stages)]
    for stage_pass in sorted(stage_passes(stages, training)):
        by_stage[stage_pass.stage].append(str(counts[stage_pass]))
    return [" + ".join(numbers) for numbers in by_stage]


def _weights(graph: Graph, stages: int) -> list[str]:
    """Bytes of parameters by the first stage that reads them."""
    sizes = [0] * stages
    for node, slot in zip(graph.placeholders, graph.inputs, strict=True):
        readers = [where.stage for user in node.users if (where := pass_of(user)) is not None]
        if slot.kind is Kind.PARAM and readers:
            sizes[min(readers)] += slot.bytes
    return [size_text(size) for size in sizes]


def _kept(staged: Staged) -> list[str]:
    """Bytes of forward values and inputs that wait for each stage's backward pass."""
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
    lines = [
        f"{name}: {_location(location)}"
        for name, location in (
            ("weights", locations.weight),
            ("activations", locations.activation),
            ("optimizer state", locations.optimizer),
            ("accumulators", locations.accumulator),
        )
    ]
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
        per = _flush(staged) if source.is_update else "micro-batch"
        lines.append([str(source), f"ipu {chip}", f"ipu {to}", str(len(values)), size, per])
    return table(lines)


def _moved(staged: Staged) -> Iterator[str]:
    slots = {
        slot.key: slot
        for graph in staged.graphs.values()
        for slot in (*graph.inputs, *graph.outputs)
    }
    streaming = staged.workload.streaming
    for verb, lists in (("loaded", streaming.loads), ("stored", streaming.stores)):
        size = sum(
            slots[key].bytes * (1 if stage_pass.is_update else staged.workload.micro_batches)
            for stage_pass, keys in lists.items()
            for key in keys
        )
        if size:
            yield f"{verb}: {size_text(size)} per {_flush(staged)}"


def _flush(staged: Staged) -> str:
    return "update" if staged.workload.training else "call"


def _rhythm(staged: Staged) -> str:
    schedule = staged.schedule
    return (
        f"schedule of one {_flush(staged)}: {_micros(staged)} in "
        f"{_count(schedule.columns, 'column')}, bubble {schedule.bubble:.0%}"
    )


def _micros(staged: Staged) -> str:
    count = staged.workload.micro_batches
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _grid(schedule: Schedule) -> list[str]:
    if schedule.columns <= _WIDEST:
        return str(schedule).splitlines()
    shown = Schedule({chip: row[:_WIDEST] for chip, row in schedule.rows.items()})
    width = max(map(len, str(shown).splitlines()))
    return [f"{line:<{width}} ..." for line in str(shown).splitlines()]


def _legend(staged: Staged) -> list[str]:
    """What the letters of the schedule mean, as far as they occur."""
    letters = {
        "F": "1F0: forward of stage 1, micro-batch 0",
        "B": "1B0: backward",
        "U": "0U1: update of chip 0, round 1",
        "L": "L, S: load from, store to streaming memory",
    }
    used = {letter for _, _, action in staged.schedule.cells() for letter in str(action)}
    return ["; ".join(text for letter, text in letters.items() if letter in used)]
