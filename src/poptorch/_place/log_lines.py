"""What a placement tells the log (PopTorch user guide, "Parallel execution")."""

from __future__ import annotations

import torch
from torch import fx

from .._base import log
from .._ir.blocks import StagePass, label_of, pass_of
from .._ir.graph import Graph
from .._ir.plan import Layout
from .._ir.spec import Placement, Spec, Strategy

_MODES = {
    Strategy.PIPELINED: "Pipelined",
    Strategy.SHARDED: "Sharded",
    Strategy.SERIAL_PHASED: "Phased",
    Strategy.PARALLEL_PHASED: "Phased",
}


def log_layout(layout: Layout, spec: Spec) -> None:
    """Log the settings that follow from a placement, and every operator's place, at DEBUG.

    Devices that idle are a WARNING, a model that needs none is an INFO.
    """
    if not layout.chips:
        log.engine.info("No IPU is used: nothing is left of the model after optimisation")
    needed = layout.chips * spec.loops.replicas
    if layout.reserved > needed:
        log.engine.warning(
            "Reserving %d IPUs when the model specifies the use of only %d. This is because "
            "PopTorch must reserve a power of 2 or a multiple of 64 IPUs. %d of the IPUs will be "
            "idle.",
            layout.reserved, needed, layout.reserved - needed,
        )  # fmt: skip
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
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
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
    return f"{_type(node)}, mode({_MODES[placement.strategy]}), ipu({stage.chip}), {where}"


def phase_number(stage_pass: StagePass, layout: Layout, placement: Placement) -> int:
    """Return the internal number of the phase of a pass.

    Backward phases go on where the forward ones end, in reverse. They share the last one, or
    leave it and the next free.
    """
    phases = [stage.phase or 0 for stage in layout.stages]
    phase = phases[stage_pass.stage]
    if stage_pass.backward:
        phase = 2 * max(phases) - phase + (0 if placement.shares_last_phase else 2)
    return phase * placement.phase_stride


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "tuple"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}({', '.join(map(str, value.shape))})"
