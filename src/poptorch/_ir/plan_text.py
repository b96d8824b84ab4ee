"""A Plan as text: program, stages and chips, what rests where, what is sent, the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .layout import Layout, Spot
from .placement import Home, Strategy
from .plan import Plan
from .schedule import Do, Part, Schedule
from .slot import Kind, Slot
from .staged import Staged

_WIDEST = 24
"""Columns of the schedule that are shown."""

_UNITS = ("B", "KiB", "MiB", "GiB")


def plan_text(plan: Plan) -> str:
    """Return everything about a plan that is worth reading, as lines."""
    lines = [str(plan.program)]
    if plan.layout is not None:
        lines += [_headline(plan, plan.layout), *_indented(_stages(plan, plan.layout))]
        lines += ["homes", *_indented(_homes(plan))]
    if plan.staged is not None:
        lines += ["sent between chips", *_indented(_sent(plan.staged))]
        moved = list(_moved(plan.staged))
        if moved:
            lines += ["streaming memory", *_indented(moved)]
        lines += [_rhythm(plan.staged), *_indented(_grid(plan.staged.schedule))]
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


def _headline(plan: Plan, layout: Layout) -> str:
    strategy = layout.placement.strategy.replace("_", " ")
    if layout.placement.strategy is Strategy.PIPELINED:
        strategy += ", interleaved" if layout.placement.interleaved else ", grouped"
    parts = [
        f"{_count(len(layout.stages), 'stage')} on {_count(layout.chips, 'IPU')}",
        _count(layout.replicas, "replica"),
        f"{_count(layout.reserved, 'IPU')} reserved",
    ]
    return f"{strategy} {'training' if plan.spec.training else 'inference'}: {', '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _stages(plan: Plan, layout: Layout) -> list[str]:
    phased = layout.placement.phased
    operators = Counter(layout.spots.values())
    weights = _weights_by_stage(layout)
    head = ["stage", "ipu", *(["phase"] if phased else []), "blocks", "operators", "weights"]
    kept = _kept(plan.staged) if plan.staged is not None else {}
    rows = [head + (["kept per micro-batch"] if kept else [])]
    for index, stage in enumerate(layout.stages):
        counts = [operators[Spot(index)]]
        if plan.spec.training:
            counts.append(operators[Spot(index, backward=True)])
        row = [str(index), str(stage.chip), *([str(stage.phase)] if phased else []), stage.name]
        row += [" + ".join(map(str, counts)), size_text(weights[index])]
        rows.append(row + ([size_text(kept.get(index, 0))] if kept else []))
    return table(rows)


def _weights_by_stage(layout: Layout) -> Counter[int]:
    """Bytes of parameters by the first stage that reads them."""
    found: Counter[int] = Counter()
    for node, slot in zip(layout.graph.placeholders, layout.graph.inputs, strict=True):
        stages = [layout.spots[user].stage for user in node.users if user in layout.spots]
        if slot.kind is Kind.PARAM and stages:
            found[min(stages)] += slot.bytes
    return found


def _kept(staged: Staged) -> dict[int, int]:
    """Bytes of forward values and inputs that wait for a stage's backward part."""
    forward = {
        slot.key
        for part, segment in staged.segments.items()
        if part.do is Do.FORWARD
        for slot in (*segment.graph.inputs, *segment.graph.outputs)
        if slot.kind in (Kind.VALUE, Kind.BATCH)
    }
    return {
        part.index: sum(s.bytes for s in segment.graph.inputs if s.key in forward)
        for part, segment in staged.segments.items()
        if part.do is Do.BACKWARD
    }


def _homes(plan: Plan) -> list[str]:
    homes = plan.spec.homes
    lines = [
        f"{name}: {_home(home)}"
        for name, home in (
            ("weights", homes.weight),
            ("activations", homes.activation),
            ("optimizer state", homes.optimizer),
            ("accumulators", homes.accumulator),
        )
    ]
    return lines + ([f"I/O tiles: {homes.io_tiles}"] if homes.io_tiles else [])


def _home(home: Home) -> str:
    words = ["on chip" if home.on_chip else "in streaming memory"]
    words += ["sharded over replicas"] if home.sharded else []
    io_tiles = (("loaded", home.load_by_io_tiles), ("stored", home.store_by_io_tiles))
    words += [f"{verb} by I/O tiles" for verb, used in io_tiles if used]
    return ", ".join(words)


def _sent(staged: Staged) -> list[str]:
    rows: dict[tuple[Part, int, int], list[Slot]] = {}
    for transfer in staged.transfers:
        chip = staged.work.chip_of(transfer.source)
        rows.setdefault((transfer.source, chip, transfer.target), []).append(transfer.value)
    if not rows:
        return ["nothing"]
    lines = [["after", "from", "to", "tensors", "bytes", "per"]]
    for (part, chip, to), values in rows.items():
        size = size_text(sum(slot.bytes for slot in values))
        per = _flush(staged) if part.do is Do.UPDATE else "micro-batch"
        lines.append([str(part), f"ipu {chip}", f"ipu {to}", str(len(values)), size, per])
    return table(lines)


def _moved(staged: Staged) -> Iterator[str]:
    slots = {
        slot.key: slot
        for segment in staged.segments.values()
        for slot in (*segment.graph.inputs, *segment.graph.outputs)
    }
    for verb, lists in (("loaded", staged.moves.loads), ("stored", staged.moves.stores)):
        size = _moved_bytes(lists, slots, staged)
        if size:
            yield f"{verb}: {size_text(size)} per {_flush(staged)}"


def _moved_bytes(
    lists: Mapping[Part, Sequence[str]], slots: Mapping[str, Slot], staged: Staged
) -> int:
    return sum(
        slots[key].bytes * (1 if part.do is Do.UPDATE else staged.work.micros)
        for part, keys in lists.items()
        for key in keys
    )


def _flush(staged: Staged) -> str:
    return "update" if staged.work.training else "call"


def _rhythm(staged: Staged) -> str:
    schedule = staged.schedule
    return (
        f"schedule of one {_flush(staged)}: {_micros(staged)} in "
        f"{_count(schedule.columns, 'column')}, bubble {schedule.bubble:.0%}"
    )


def _micros(staged: Staged) -> str:
    count = staged.work.micros
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _grid(schedule: Schedule) -> list[str]:
    if schedule.columns <= _WIDEST:
        return str(schedule).splitlines()
    shown = Schedule({chip: row[:_WIDEST] for chip, row in schedule.rows.items()})
    width = max(map(len, str(shown).splitlines()))
    return [f"{line:<{width}} ..." for line in str(shown).splitlines()]
