"""Decide on which chip each operator and each tensor is. The result is a Layout. Source: PopTorch
user guide, "Parallel execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .._base import log
from .._base.errors import Error
from .._ir.block_labels import PlacedStage, StagePass, Visit, label_of, pass_of
from .._ir.graph import Graph
from .._ir.plan import Layout
from .._ir.slots import Kind, Slot
from .._ir.spec import Placement, Spec, Strategy
from .stages import group_visits, resolve, with_passes

LIMIT = 64  # largest number of devices that one process may use


def place(graph: Graph, visits: Sequence[Visit], spec: Spec) -> Layout:
    placed = resolve(graph, visits, spec.placement)
    stages, of_visit = group_visits(graph, placed, spec.placement)
    graph = with_passes(graph, of_visit, len(stages))
    chips = max(stage.chip for stage in stages) + 1 if graph.operators else 0
    on = [0, *(item.chip for item in placed)]
    depth = 1 + sum(before != after for before, after in itertools.pairwise(on))
    check_batches(depth, len(stages), spec)
    find_homes(graph, stages)  # raises an error if stages on several chips would share a weight
    return Layout(stages, depth, chips, reserve(chips, spec), graph)


def check_batches(depth: int, stages: int, spec: Spec) -> None:
    """Check that there are enough micro-batches to fill the pipeline. The 1.0 interface counts
    ``stages``.
    """
    if spec.placement.strategy is not Strategy.PIPELINED or not spec.placement.fills:
        return
    loops, first_release = spec.loops, spec.placement.first_release
    given = loops.accumulation if spec.training else loops.iterations
    needed = stages if first_release else 2 * depth - 1 if spec.training else depth
    if given >= needed:
        return
    if not spec.training:
        name, setter = "deviceIterations", f"options.deviceIterations({needed})"
        got = f"deviceIterations({given}) with {needed} stages"
    elif first_release:
        name, setter = "gradientAccumulation", f"gradient_accumulation={needed}"
        got = f"gradient_accumulation={given} with {needed} stages"
    else:
        name, setter = "gradientAccumulation", f"options.Training.gradientAccumulation({needed})"
        got = (
            f"Training.gradientAccumulation({given}) with {depth} forward stages; "
            f"when training there are {depth - 1} additional stages for the backward pass"
        )
    raise Error(
        f"{name} must be greater than or equal to the number of pipeline stages ({needed})",
        got=got,
        fix=f"use {setter}, or fewer devices",
    )


def reserve(per_replica: int, spec: Spec) -> int:
    own = -(-per_replica // spec.target.parts)  # IPUs of the process that runs most of them
    needed = own * spec.loops.replicas
    if needed > LIMIT:
        raise Error(
            f"Too many IPUs requested ({needed}): models with more than {LIMIT} IPUs require "
            "distributed execution",
            fix="start several processes with poprun, so that each runs some of the replicas",
        )
    rounded = 1 << (needed - 1).bit_length() if needed else 0
    if spec.target.device != "ipu" or needed == rounded:
        return needed
    if not spec.target.auto_round:
        raise Error(
            f"The model specifies the use of {needed} IPUs, however PopTorch must reserve a "
            f"minimum of {rounded} in order to allow the model to run, because PopTorch must "
            "reserve a power of 2 or a multiple of 64 IPUs",
            got=f"{own} IPUs per replica, {spec.loops.replicas} replicas",
            fix=(
                f"to reserve {rounded - needed} more IPUs, which stay idle: "
                "options.autoRoundNumIPUs(True)"
            ),
        )
    return rounded


def find_homes(graph: Graph, stages: Sequence[PlacedStage]) -> dict[str, tuple[int, ...]]:
    """Return the chips of every state input, by slot key. A weight is on one chip."""
    chips = tuple(sorted({stage.chip for stage in stages}))
    # Buffers and constants that forward changes, with the node of the new value.
    changed = graph.updates
    written = {slot.key: node for slot, node in graph.results if slot.key in changed}
    homes = {}
    for node, slot in graph.arguments.items():
        if not slot.is_state:
            continue
        if slot.kind in (Kind.HYPER, Kind.RNG):
            homes[slot.key] = chips
            continue
        touching = [*node.users, *([written[slot.key]] if slot.key in written else [])]
        readers: dict[int, PlacedStage] = {}  # with the first stage of each chip
        for where in filter(None, map(pass_of, touching)):
            readers.setdefault(stages[where.stage].chip, stages[where.stage])
        if len(readers) > 1 and (slot.kind is Kind.PARAM or slot.key in written):
            raise _shared(slot, readers)
        homes[slot.key] = tuple(sorted(readers)) or chips[:1]
    return homes


def _shared(slot: Slot, readers: Mapping[int, PlacedStage]) -> Error:
    where = ", ".join(f"IPU {chip} ({stage.name})" for chip, stage in sorted(readers.items()))
    if slot.kind is Kind.PARAM:
        return Error(
            f"Parameter '{slot.path}' is shared by several IPUs",
            got=f"the buffer is read on {where}",
            fix="place the layers that share weights on the same IPU",
        )
    return Error(
        f"Buffer '{slot.path}' is changed on one IPU and used on another",
        got=f"the parameter is used on {where}",
        fix="place all layers that use the buffer on the same IPU",
    )


def log_layout(layout: Layout, spec: Spec) -> None:
    if not layout.chips:
        log.engine.info("No IPU is used, because optimisation removed everything from the model")
    needed = layout.chips * spec.loops.replicas
    if layout.reserved > needed:
        log.engine.warning(
            f"Reserving {layout.reserved} IPUs when the model specifies the use of only {needed}. "
            "This is because PopTorch must reserve a power of 2 or a multiple of 64 IPUs. "
            f"{layout.reserved - needed} of the IPUs will be idle."
        )
    if not log.shows("DEBUG"):
        return
    placement = spec.placement
    pipelined = placement.strategy is Strategy.PIPELINED and layout.chips > 1
    log.engine.debug("enablePipelining set to value %d", pipelined)
    if placement.phased:
        parallel = placement.strategy is Strategy.PARALLEL_PHASED
        log.engine.debug("executionPhaseSettings.phases set to value %d", placement.total_phases)
        log.engine.debug("executionPhaseSettings.stages set to value %d", 2 if parallel else 1)
    for node, name in operator_names(layout.graph).items():
        log.engine.debug("%s:0 [%s]", name, _placed(node, layout, placement))


def operator_names(graph: Graph) -> dict[fx.Node, str]:
    """Return ``module/path/Operator`` for every operator; repeated names end in /1, /2, ..."""
    seen: dict[str, int] = {}
    names = {}
    for node in graph.operators:
        operator = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        words = "".join(word.capitalize() for word in operator.split("_"))
        path = label_of(node).path.replace(".", "/")
        name = f"{path}/{words}" if path else words
        count = seen[name] = seen.get(name, -1) + 1
        names[node] = f"{name}/{count}" if count else name
    return names


def _placed(node: fx.Node, layout: Layout, placement: Placement) -> str:
    stage_pass = pass_of(node)
    assert stage_pass is not None, "every operator was placed"
    stage = layout.stages[stage_pass.stage]
    where = f"stage({stage_pass.delay(len(layout.stages))})"
    if stage.phase is not None:
        where = f"phase({phase_number(stage_pass, layout, placement)})"
    mode = "Phased" if placement.phased else placement.strategy.capitalize()
    value, kind = node.meta.get("val"), "tuple"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        kind = f"{dtype}({', '.join(map(str, value.shape))})"
    return f"{kind}, mode({mode}), ipu({stage.chip}), {where}"


def phase_number(stage_pass: StagePass, layout: Layout, placement: Placement) -> int:
    """Return the phase of a pass. Backward phases continue in reverse where the forward ones end,
    or leave two numbers free.
    """
    phases = [stage.phase or 0 for stage in layout.stages]
    phase = phases[stage_pass.stage]
    if stage_pass.backward:
        phase = 2 * max(phases) - phase + (0 if placement.shares_last_phase else 2)
    return phase * placement.phase_stride
