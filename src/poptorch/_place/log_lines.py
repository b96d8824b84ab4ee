"""What a placement tells the log (PopTorch user guide, "Parallel execution")."""

from __future__ import annotations

import torch
from torch import fx

from .._base import log
from .._ir.blocks import label_of
from .._ir.layout import Layout
from .._ir.placement import Strategy

_MODES = {
    Strategy.PIPELINED: "Pipelined",
    Strategy.SHARDED: "Sharded",
    Strategy.SERIAL_PHASED: "Phased",
    Strategy.PARALLEL_PHASED: "Phased",
}


def log_layout(layout: Layout) -> None:
    """Log the blocks, the settings that follow from them, and every operator's place, at DEBUG.

    Devices that idle are a WARNING, a model that needs none is an INFO.
    """
    if not layout.chips:
        log.engine.info("No IPU is used: nothing is left of the model after optimisation")
    needed = layout.chips * layout.replicas
    if layout.reserved > needed:
        log.engine.warning(
            "Reserving %d IPUs when the model specifies the use of only %d. This is because "
            "PopTorch must reserve a power of 2 or a multiple of 64 IPUs. %d of the IPUs will be "
            "idle.",
            layout.reserved, needed, layout.reserved - needed,
        )  # fmt: skip
    if log.shows("DEBUG"):
        _log_blocks(layout)
        names = operator_names(layout)
        for node in layout.spots:
            log.engine.debug("%s:0 [%s]", names[node], _placed(node, layout))


def _log_blocks(layout: Layout) -> None:
    placement = layout.placement
    for item in layout.assigned[1:]:
        block = item.visit.block
        if item.by_default:
            log.engine.debug(
                "No IPU specified for block %s: default to stage_id %d", block, item.stage
            )
        log.engine.debug(
            "Starting block id=%s stage=%s phase=%s ipu=%s",
            block, item.stage, item.phase, item.chip,
        )  # fmt: skip
    pipelined = placement.strategy is Strategy.PIPELINED and layout.chips > 1
    log.engine.debug("enablePipelining set to value %d", pipelined)
    if placement.phased:
        parallel = placement.strategy is Strategy.PARALLEL_PHASED
        log.engine.debug("executionPhaseSettings.phases set to value %d", placement.total_phases)
        log.engine.debug("executionPhaseSettings.stages set to value %d", 2 if parallel else 1)


def operator_names(layout: Layout) -> dict[fx.Node, str]:
    """Return ``module/path/Operator`` for every operator; repeated names end in /1, /2, ..."""
    seen: dict[str, int] = {}
    names = {}
    for node in layout.spots:
        operator = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        words = "".join(word.capitalize() for word in operator.split("_"))
        path = label_of(node).module.replace(".", "/")
        name = f"{path}/{words}" if path else words
        count = seen[name] = seen.get(name, -1) + 1
        names[node] = f"{name}/{count}" if count else name
    return names


def _placed(node: fx.Node, layout: Layout) -> str:
    spot = layout.spots[node]
    stage = layout.stages[spot.stage]
    number = 2 * len(layout.stages) - 2 - spot.stage if spot.backward else spot.stage
    where = f"stage({number})"
    if stage.phase is not None:
        where = f"phase({layout.phase_number(spot)})"
    mode = _MODES[layout.placement.strategy]
    return f"{_type(node)}, mode({mode}), ipu({stage.chip}), {where}"


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "tuple"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}({', '.join(map(str, value.shape))})"
