"""Visits -> stages: which visits are one stage, and the order of the stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from .._base import source
from .._base.errors import Error
from .._ir.blocks import OUTSIDE, Stage, label_of
from .._ir.graph import Graph
from .._ir.spec import Placement, Strategy
from .resolve import PlacedVisit

Key = tuple[int, ...]


def group_visits(
    graph: Graph, placed: Sequence[PlacedVisit], placement: Placement
) -> tuple[tuple[Stage, ...], dict[int, int]]:
    """Group visits into stages.

    Returns:
        The stages in forward order, and the stage of every visit that has nodes, by its index.

    Raises:
        Error: an operator in no block, a stage on two devices, or data that flows from a later
            stage to an earlier one.
    """
    flow = _Flow(graph)
    used = {visit: placed[visit] for visit in sorted(flow.visits)}
    if placement.phased:
        keys = _phase_keys(used, flow)
    elif placement.strategy is Strategy.SHARDED:
        keys = _runs(used)
    else:
        keys = _stage_keys(used)
    order = sorted(set(keys.values()))
    of_visit = {visit: order.index(key) for visit, key in keys.items()}
    members = [[used[v] for v, at in of_visit.items() if at == i] for i in range(len(order))]
    stages = tuple(map(_stage, members))
    flow.check(of_visit, used)
    return stages or (Stage(0),), of_visit


class _Flow:
    """Which visits have nodes, and between which of them data flows."""

    def __init__(self, graph: Graph) -> None:
        self.visits: set[int] = set()
        self.edges: dict[tuple[int, int], fx.Node] = {}
        for node in graph.module.graph.nodes:
            visit = _forward_visit(node)
            if visit is None:
                continue
            if visit == OUTSIDE:
                raise _no_block(node)
            self.visits.add(visit)
            for before in node.all_input_nodes:
                earlier = _forward_visit(before)
                if earlier not in (None, visit):
                    self.edges.setdefault((earlier, visit), node)

    def into(self, visit: int) -> Iterable[int]:
        """Visits that a visit reads from."""
        return (start for start, end in self.edges if end == visit)

    def check(self, of_visit: Mapping[int, int], used: Mapping[int, PlacedVisit]) -> None:
        for (start, end), node in self.edges.items():
            if of_visit[start] > of_visit[end]:
                raise _against_the_flow(used[start], used[end], node)


def _forward_visit(node: fx.Node) -> int | None:
    if node.op != "call_function":
        return None
    label = label_of(node)
    return None if label.backward else label.visit


def _stage_keys(used: Mapping[int, PlacedVisit]) -> dict[int, Key]:
    """Pipelined: stage ids; neighbouring ids on one device are one stage."""
    chips: dict[int, PlacedVisit] = {}
    for item in used.values():
        first = chips.setdefault(item.stage, item)
        if first.chip != item.chip:
            raise Error(
                "A pipeline stage runs on one IPU",
                got=f"stage {item.stage} has block {first.visit.block or '(start)'} on IPU "
                f"{first.chip} and block {item.visit.block} on IPU {item.chip}",
                where=item.visit.line,
                fix="put the blocks into stages of their own, or on one IPU",
            )
    numbers: dict[int, int] = {}
    last = None
    for stage in sorted(chips):
        chip = chips[stage].chip
        numbers[stage] = len(set(numbers.values())) - (chip == last)
        last = chip
    return {visit: (numbers[item.stage],) for visit, item in used.items()}


def _runs(used: Mapping[int, PlacedVisit]) -> dict[int, Key]:
    """Sharded: one stage for each stretch of execution on one device."""
    keys: dict[int, Key] = {}
    number, last = -1, None
    for visit, item in used.items():
        number += item.chip != last
        last = item.chip
        keys[visit] = (number,)
    return keys


def _phase_keys(used: Mapping[int, PlacedVisit], flow: _Flow) -> dict[int, Key]:
    """Phased: devices of a phase work side by side, in rounds between which they exchange data."""
    rounds: dict[int, int] = {}
    for visit, item in used.items():
        same_phase = [b for b in flow.into(visit) if used[b].phase == item.phase and b in rounds]
        hops = [rounds[b] + (used[b].chip != item.chip) for b in same_phase]
        rounds[visit] = max(hops, default=0)
    return {v: (item.phase or 0, rounds[v], item.chip) for v, item in used.items()}


def _stage(members: Sequence[PlacedVisit]) -> Stage:
    blocks = dict.fromkeys(m.visit.block for m in members if m.visit.block is not None)
    return Stage(members[0].chip, tuple(blocks), members[0].phase)


def _line(node: fx.Node) -> str | None:
    line = source.innermost_user_line(node.stack_trace)
    return source.describe(*line) if line else None


def _no_block(node: fx.Node) -> Error:
    return Error(
        "No active Block, all the ops must belong to a Block",
        got=f"{node.target} runs after a block has ended and before another begins",
        where=_line(node),
        fix=(
            "put it inside a poptorch.Block of its own, the loss too",
            "or use poptorch.Block.start or BeginBlock, which last until another block begins",
        ),
    )


def _against_the_flow(start: PlacedVisit, end: PlacedVisit, node: fx.Node) -> Error:
    def described(item: PlacedVisit) -> str:
        phase = "" if item.phase is None else f"phase {item.phase}, "
        return f"block {item.visit.block or '(start)'} ({phase}stage {item.stage})"

    what = "Stage" if start.phase is None else "Phase"
    return Error(
        f"{what} ids must ascend along the data flow",
        got=f"{described(end)} reads a result of {described(start)}",
        where=_line(node) or end.visit.line,
        fix=(
            "poptorch.AutoStage.AutoIncrement numbers blocks in the order in which they run",
            "or name the stages in that order: PipelinedExecution(poptorch.Stage(...), ...)",
        ),
    )
