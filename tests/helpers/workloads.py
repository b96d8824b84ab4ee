"""Workloads for schedules: a chain of stages, without any graphs; and schedules from their text."""

import re
from collections.abc import Sequence

from poptorch._ir.block_labels import Direction, PlacedStage, StagePass
from poptorch._ir.schedule import Action, Schedule, Streaming, Traffic, Workload, padded

forward = StagePass


def backward(stage: int) -> StagePass:
    return StagePass(stage, Direction.BACKWARD)


def chain(
    chips: Sequence[int],
    micro_batches: int,
    training: bool = True,
    phased: bool = False,
    rounds: int = 1,
) -> Workload:
    """A workload whose stages each read the one before.

    Args:
        chips: the chip of each stage.
        micro_batches: how many there are.
        training: whether there are backward passes and an update.
        phased: whether what each stage reads is loaded and what it makes is stored.
        rounds: of the update.
    """
    stages = range(len(chips))
    needs = {forward(s): frozenset({forward(s - 1)} if s else ()) for s in stages}
    if training:
        for s in stages:
            later = {backward(s + 1)} if s + 1 < len(chips) else set()
            needs[backward(s)] = frozenset({forward(s), *later})
    streaming = Streaming()
    if phased:
        loads = {forward(s): (f"param.{s}",) for s in stages}
        stores = {forward(s): (f"value.{s}",) for s in stages}
        if training:
            loads |= {backward(s): (f"value.{s}",) for s in stages}
            stores |= {backward(s): (f"gradient.{s}",) for s in stages}
        streaming = Streaming(loads, stores)
    updates = [
        StagePass(chip, Direction.UPDATE, number)
        for number in range(rounds if training else 0)
        for chip in sorted(set(chips))
    ]
    return Workload(
        tuple(PlacedStage(chip, (), s if phased else None) for s, chip in enumerate(chips)),
        micro_batches=micro_batches,
        training=training,
        needs=needs,
        updates=tuple(updates),
        streaming=streaming,
    )


def action(text: str) -> Action:
    """Return the action that a text such as ``L1F3`` describes."""
    match = re.fullmatch(r"([LS]?)(\d+)([FBU])(\d+)", text)
    assert match is not None, text
    direction, number = Direction(match[3]), int(match[4])
    rounds, micro_batch = (number, 0) if direction is Direction.UPDATE else (0, number)
    traffic = Traffic(match[1]) if match[1] else None
    return Action(StagePass(int(match[2]), direction, rounds), micro_batch, traffic)


def parsed(text: str) -> Schedule:
    """Return the schedule that lines such as ``chip 0: 0F0 . 0B0`` describe."""
    rows = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        chip, _, cells = line.removeprefix("chip").partition(":")
        rows[int(chip)] = [None if cell == "." else action(cell) for cell in cells.split()]
    return Schedule(padded(rows))
