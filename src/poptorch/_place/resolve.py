"""Visit of a block + the user's strategy -> stage, phase, device."""

from __future__ import annotations

from collections.abc import Sequence

from .._base.errors import AssertionFailure, Error
from .._ir.blocks import Visit
from .._ir.layout import Assigned
from .._ir.placement import NamedStage, Placement, Strategy
from ..enums import AutoStage


def resolve(visits: Sequence[Visit], placement: Placement) -> list[Assigned]:
    """Return where each visit runs.

    Raises:
        AssertionFailure: a block without a device under SameAsIpu, or one that no stage names.
        Error: a device of the wrong parity in parallel phases, or a negative one.
    """
    first_phase = 0 if placement.phased else None
    found = [Assigned(visits[0], 0, first_phase, 0)]
    automatic: dict[str, int] = {}
    for visit in visits[1:]:
        assert visit.block is not None
        if placement.auto_stage is None:
            assigned = _named(visit, placement)
        else:
            number = automatic.setdefault(visit.block, len(automatic) + 1)
            assigned = _automatic(visit, placement.auto_stage, number)
        _check_device(assigned, placement)
        found.append(assigned)
    return found


def _automatic(visit: Visit, rule: AutoStage, number: int) -> Assigned:
    if rule == AutoStage.AutoIncrement:
        return Assigned(visit, number, None, *_device(visit, None, number))
    if visit.ipu is None:
        raise AssertionFailure(
            "poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block "
            f"{visit.block}",
            where=visit.line,
            fix=(
                f'name the device: poptorch.Block("{visit.block}", ipu_id=...)',
                "or choose PipelinedExecution(poptorch.AutoStage.AutoIncrement)",
            ),
        )
    return Assigned(visit, visit.ipu, None, visit.ipu)


def _named(visit: Visit, placement: Placement) -> Assigned:
    stage = placement.find(visit.block or "")
    if stage is None:
        known = ", ".join(block for named in placement.stages for block in named.blocks)
        raise AssertionFailure(
            f"Unknown Block {visit.block}: no stage of the execution strategy mentions it",
            got=f"known blocks: {known or 'none'}",
            where=visit.line,
            fix="add its id to one of the strategy's stages",
        )
    return Assigned(visit, stage.stage, stage.phase, *_device(visit, stage, stage.stage))


def _device(visit: Visit, stage: NamedStage | None, default: int) -> tuple[int, bool]:
    """Return the device, and whether it is the default."""
    if stage is not None and stage.ipu is not None:
        return stage.ipu, False
    if visit.ipu is not None:
        return visit.ipu, False
    return default, True


def _check_device(assigned: Assigned, placement: Placement) -> None:
    if assigned.chip < 0:
        raise Error(
            "An IPU id cannot be negative",
            got=f"block {assigned.visit.block} on IPU {assigned.chip}",
            where=assigned.visit.line,
        )
    parallel = placement.strategy is Strategy.PARALLEL_PHASED
    if parallel and assigned.phase is not None and (assigned.phase - assigned.chip) % 2:
        raise Error(
            "In parallel phased execution even phases must run on even IPUs and odd phases on odd "
            "IPUs",
            got=f"block {assigned.visit.block} of phase {assigned.phase} on IPU {assigned.chip}",
            where=assigned.visit.line,
            fix="choose the devices with strategy.phase(i).ipus(...) or Stage(...).ipu(n)",
        )
