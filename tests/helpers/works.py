"""Work for schedules: a chain of stages, without any graphs."""

from __future__ import annotations

from collections.abc import Sequence

from poptorch._ir.schedule import Do, Part, Work


def forward(stage: int) -> Part:
    return Part(Do.FORWARD, stage)


def backward(stage: int) -> Part:
    return Part(Do.BACKWARD, stage)


def chain(
    chips: Sequence[int],
    micros: int,
    training: bool = True,
    phased: bool = False,
    rounds: int = 1,
) -> Work:
    """Return work in which every stage reads the one before it.

    Phased: each stage is a phase of its own, everything is loaded and stored.
    """
    stages = range(len(chips))
    needs = {forward(s): frozenset({forward(s - 1)} if s else ()) for s in stages}
    if training:
        for s in stages:
            later = {backward(s + 1)} if s + 1 < len(chips) else set()
            needs[backward(s)] = frozenset({forward(s), *later})
    parts = [forward(s) for s in stages] + ([backward(s) for s in stages] if training else [])
    used = tuple(sorted(set(chips)))
    return Work(
        chips=tuple(chips),
        micros=micros,
        training=training,
        needs=needs,
        updates=tuple(used for _ in range(rounds)) if training else (),
        loads=frozenset(parts) if phased else frozenset(),
        stores=frozenset(parts) if phased else frozenset(),
        fetches={backward(s): frozenset({forward(s)}) for s in stages} if phased else {},
        phases=tuple(stages) if phased else tuple(None for _ in stages),
    )
