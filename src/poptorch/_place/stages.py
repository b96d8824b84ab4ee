"""Assign visits of blocks to stages and chips, and every node to the pass in which it runs."""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .._base import log, source
from .._base.errors import AssertionFailure, Error
from .._ir.block_labels import (
    OUTSIDE,
    Direction,
    PlacedStage,
    StagePass,
    Visit,
    label_of,
    pass_of,
    reader_passes,
    relabel,
)
from .._ir.graph import Graph
from .._ir.spec import Placement, Strategy
from ..enums import AutoStage

Key = tuple[int, ...]


@dataclass(frozen=True)
class PlacedVisit:
    visit: Visit
    stage: int  # its id; in phased strategies, its number within the phase
    phase: int | None  # the phase that the user chose
    chip: int


def resolve(graph: Graph, visits: Sequence[Visit], placement: Placement) -> list[PlacedVisit]:
    # some operators run before the first block
    begun = any(_forward_visit(node) == 0 for node in graph.operators)
    first_phase = 0 if placement.phased else None
    placed = [PlacedVisit(visits[0], 0, first_phase, 0)]
    automatic: dict[str, int] = {}
    for visit in visits[1:]:
        assert visit.block is not None
        if placement.auto_stage is None:
            place = _named(visit, placement)
        else:
            number = automatic.setdefault(visit.block, len(automatic))
            place = _automatic(visit, placement, number, begun)
        if place.chip < 0:
            raise Error(
                "An IPU id cannot be negative",
                got=f"block {visit.block} on IPU {place.chip}",
                where=visit.line,
                fix="number the devices of the model starting with 0",
            )
        parallel = placement.strategy is Strategy.PARALLEL_PHASED
        if parallel and place.phase is not None and (place.phase - place.chip) % 2:
            raise Error(
                "In parallel phased execution even phases must run on even IPUs and odd phases on "
                "odd IPUs",
                got=f"block {visit.block} of phase {place.phase} on IPU {place.chip}",
                where=visit.line,
                fix="choose the devices with strategy.phase(i).ipus(...) or Stage(...).ipu(n)",
            )
        log.engine.debug(
            "Starting block id=%s stage=%s phase=%s ipu=%s",
            visit.block, place.stage, place.phase, place.chip,
        )  # fmt: skip
        placed.append(place)
    blocks = {visit.block for visit in visits}
    # A strategy may be used for several models, but a name that does not exist may be misspelt.
    unused = [name for stage in placement.stages for name in stage.blocks if name not in blocks]
    if unused:
        log.python.warning(
            "The execution strategy names blocks that the model does not have: %s. It has: %s",
            ", ".join(unused),
            ", ".join(sorted(filter(None, blocks))) or "none",
        )
    return placed


def _automatic(visit: Visit, placement: Placement, number: int, begun: bool) -> PlacedVisit:
    stage = number  # sharded: "if no Stage is specified, the user_id is used", one after another
    if placement.auto_stage == AutoStage.AutoIncrement:
        stage += begun
    elif visit.ipu is not None:
        stage = visit.ipu
    elif placement.strategy is not Strategy.SHARDED:
        raise AssertionFailure(
            "poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block "
            f"{visit.block}",
            where=visit.line,
            fix=(
                f'name the device: poptorch.Block("{visit.block}", ipu_id=...)',
                "or choose PipelinedExecution(poptorch.AutoStage.AutoIncrement)",
            ),
        )
    return PlacedVisit(visit, stage, None, _device(visit, None, stage))


def _named(visit: Visit, placement: Placement) -> PlacedVisit:
    stage = placement.find(visit.block or "")
    if stage is None:
        names = [block for named in placement.stages for block in named.blocks]
        known = ", ".join(names)
        close = difflib.get_close_matches(visit.block or "", names, n=1)
        raise AssertionFailure(
            f"Unknown Block {visit.block}: no stage of the execution strategy mentions it",
            got=f"known blocks: {known or 'none'}",
            where=visit.line,
            fix=(
                *(
                    f"use the same id in both places, if this is the block {name!r} of the strategy"
                    for name in close
                ),
                "add the id of the block to one of the stages of the strategy",
            ),
        )
    return PlacedVisit(visit, stage.stage, stage.phase, _device(visit, stage.ipu, stage.stage))


def _device(visit: Visit, fixed: int | None, stage: int) -> int:
    """Return the device: the strategy's if it has one, else the block's, else the number
    of the stage.
    """
    if fixed is not None:
        return fixed
    if visit.ipu is not None:
        return visit.ipu
    log.engine.debug("No IPU specified for block %s: default to stage_id %d", visit.block, stage)
    return stage


def group_visits(
    graph: Graph, placed: Sequence[PlacedVisit], placement: Placement
) -> tuple[tuple[PlacedStage, ...], dict[int, int]]:
    """Return the stages in forward order, and the stage of every visit that has nodes."""
    visits, edges = _flow(graph)
    used = {visit: placed[visit] for visit in sorted(visits)}
    if placement.phased:
        keys = _phase_keys(used, edges)
    # one stage for each group of neighbouring blocks on one device
    elif placement.strategy is Strategy.SHARDED:
        keys = {visit: (run,) for visit, run in _runs(used).items()}
    else:
        keys = _stage_keys(used)
    # A block whose results nothing reads is ignored, so its device may be missing.
    read = {item.visit.block for item in used.values()}
    unread = {item.visit.block: item.visit.line for item in placed[1:]}
    texts = [f"{b} ({line})" if line else f"{b}" for b, line in unread.items() if b not in read]
    if texts:
        log.python.warning(
            "Nothing uses the results of these blocks, so they are left out: %s", "; ".join(texts)
        )
    order = sorted(set(keys.values()))
    of_visit = {visit: order.index(key) for visit, key in keys.items()}
    members = [[used[v] for v, at in of_visit.items() if at == i] for i in range(len(order))]
    for (start, end), node in edges.items():
        if of_visit[start] > of_visit[end]:
            raise _against_the_flow(used[start], used[end], node)
    return tuple(map(_stage, members)) or (PlacedStage(0),), of_visit


def _flow(graph: Graph) -> tuple[set[int], dict[tuple[int, int], fx.Node]]:
    visits: set[int] = set()
    edges: dict[tuple[int, int], fx.Node] = {}
    for node in graph.module.graph.nodes:
        visit = _forward_visit(node)
        if visit is None:
            continue
        if visit == OUTSIDE:
            raise Error(
                "No active Block, all the ops must belong to a Block",
                got=(
                    f"{node.target} runs after one block has ended and before the next one begins"
                ),
                where=_line(node),
                fix=(
                    "put these operators, including the loss, inside a poptorch.Block",
                    (
                        "or use poptorch.Block.start or BeginBlock, which last until the next "
                        "block begins"
                    ),
                ),
            )
        visits.add(visit)
        for before in map(_forward_visit, node.all_input_nodes):
            if before not in (None, visit):
                edges.setdefault((before, visit), node)
    return visits, edges


def _forward_visit(node: fx.Node) -> int | None:
    label = label_of(node)
    return None if node.op != "call_function" or label.backward else label.visit


def _runs(placed: Mapping[int, PlacedVisit]) -> dict[int, int]:
    """Number the groups of neighbours that are on one chip."""
    runs = itertools.groupby(placed, lambda each: placed[each].chip)
    return {each: number for number, (_, run) in enumerate(runs) for each in run}


def _stage_keys(used: Mapping[int, PlacedVisit]) -> dict[int, Key]:
    """Return keys for pipelined execution: stage ids; neighbouring ids on one device form
    one stage.
    """
    first_of: dict[int, PlacedVisit] = {}
    for item in used.values():
        first = first_of.setdefault(item.stage, item)
        if first.chip != item.chip:
            raise Error(
                "A pipeline stage can run on only one IPU",
                got=f"stage {item.stage} has block {first.visit.block or '(start)'} on IPU "
                f"{first.chip} and block {item.visit.block} on IPU {item.chip}",
                where=item.visit.line,
                fix="put the blocks into different stages, or on one IPU",
            )
    numbers = _runs(dict(sorted(first_of.items())))
    return {visit: (numbers[item.stage],) for visit, item in used.items()}


def _phase_keys(
    used: Mapping[int, PlacedVisit], edges: Iterable[tuple[int, int]]
) -> dict[int, Key]:
    """Return keys for phased execution: devices of a phase work side by side, in rounds between
    which they exchange data.
    """
    rounds: dict[int, int] = {}
    for visit, item in used.items():
        before = [a for a, b in edges if b == visit and a in rounds and used[a].phase == item.phase]
        rounds[visit] = max((rounds[b] + (used[b].chip != item.chip) for b in before), default=0)
    return {v: (item.phase or 0, rounds[v], item.chip) for v, item in used.items()}


def _stage(members: Sequence[PlacedVisit]) -> PlacedStage:
    blocks = dict.fromkeys(m.visit.block for m in members if m.visit.block is not None)
    return PlacedStage(members[0].chip, tuple(blocks), members[0].phase)


def _line(node: fx.Node) -> str | None:
    line = source.innermost_user_line(node.stack_trace)
    return source.describe(*line) if line else None


def _against_the_flow(start: PlacedVisit, end: PlacedVisit, node: fx.Node) -> Error:
    def described(item: PlacedVisit) -> str:
        phase = "" if item.phase is None else f"phase {item.phase}, "
        return f"block {item.visit.block or '(start)'} ({phase}stage {item.stage})"

    what = "Stage" if start.phase is None else "Phase"
    return Error(
        f"{what} ids must increase along the data flow",
        got=f"{described(end)} reads a result of {described(start)}",
        where=_line(node) or end.visit.line,
        fix=(
            (
                "use poptorch.AutoStage.AutoIncrement, which numbers the blocks in the order in "
                "which they run"
            ),
            "or list the stages in this order: PipelinedExecution(poptorch.Stage(...), ...)",
        ),
    )


def with_passes(graph: Graph, of_visit: Mapping[int, int], stages: int) -> Graph:
    """Return a graph whose operators are labelled with their pass.

    Operators outside of visits follow their inputs, as early as possible. Operators without inputs
    run in the pass of their first reader.
    """
    graph = graph.copy()
    for node in graph.operators:
        label = label_of(node)
        stage = None if label.visit is None else of_visit.get(label.visit)
        if stage is not None:
            _write(node, _in_direction(stage, label.backward))
    # State is on the chip of the first stage that reads it.
    homes = {
        node: StagePass(min(reader.stage for reader in reader_passes(node)))
        for node, slot in graph.arguments.items()
        if slot.is_state and reader_passes(node)
    }
    floating = []
    for node in graph.operators:
        own = pass_of(node)
        inputs = [where for i in node.all_input_nodes if (where := pass_of(i)) is not None]
        if node.target is operator.getitem:  # one result of an operator with several
            own = inputs[0]
        elif own is not None:
            # Gradients never flow to a later stage. If they did, waiting would still be correct.
            own = max([own, *inputs])
        else:
            inputs += [homes[i] for i in node.all_input_nodes if i in homes]
            if not inputs:
                floating.append(node)
                continue
            own = max(inputs)
            # without a gradient among their inputs, they run in their last stage
            if label_of(node).backward:
                own = max(own, StagePass(own.stage, Direction.BACKWARD))
        _write(node, own)
    for node in reversed(floating):
        backward = label_of(node).backward
        first = _in_direction(stages - 1 if backward else 0, backward)
        _write(node, max(first, min(reader_passes(node), default=first)))
    return graph


def _in_direction(stage: int, backward: bool) -> StagePass:
    return StagePass(stage, Direction.BACKWARD if backward else Direction.FORWARD)


def _write(node: fx.Node, stage_pass: StagePass) -> None:
    label = label_of(node)
    if label.stage_pass != stage_pass:
        relabel(node, replace(label, stage_pass=stage_pass))
