"""Visit of a block + the user's strategy -> stage, phase, device."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from .._base import log
from .._base.errors import AssertionFailure, Error
from .._ir.blocks import Visit
from .._ir.spec import Placement, Strategy
from ..enums import AutoStage


@dataclass(frozen=True)
class PlacedVisit:
    """Where a visit of a block runs.

    Attributes:
        visit: the visit.
        stage: the stage id; in phased strategies the stage's number within its phase.
        phase: the phase that the user named, or None.
        chip: the device.
    """

    visit: Visit
    stage: int
    phase: int | None
    chip: int


def resolve(visits: Sequence[Visit], placement: Placement) -> list[PlacedVisit]:
    """Return where each visit runs, and log it.

    Raises:
        AssertionFailure: a block without a device under SameAsIpu, or one that no stage names.
        Error: a device of the wrong parity in parallel phases, or a negative one.
    """
    first_phase = 0 if placement.phased else None
    placed = [PlacedVisit(visits[0], 0, first_phase, 0)]
    automatic: dict[str, int] = {}
    for visit in visits[1:]:
        assert visit.block is not None
        if placement.auto_stage is None:
            here = _named(visit, placement)
        else:
            number = automatic.setdefault(visit.block, len(automatic) + 1)
            here = _automatic(visit, placement, number)
        _check_device(here, placement)
        log.engine.debug(
            "Starting block id=%s stage=%s phase=%s ipu=%s",
            visit.block, here.stage, here.phase, here.chip,
        )  # fmt: skip
        placed.append(here)
    _tell_unused({visit.block for visit in visits}, placement)
    return placed


def _tell_unused(blocks: Set[str | None], placement: Placement) -> None:
    """A strategy may serve several models; but a name that is not there may be misspelt."""
    unused = [name for stage in placement.stages for name in stage.blocks if name not in blocks]
    if unused:
        log.python.warning(
            "The execution strategy names blocks that the model does not have: %s. It has: %s",
            ", ".join(unused),
            ", ".join(sorted(filter(None, blocks))) or "none",
        )


def _automatic(visit: Visit, placement: Placement, number: int) -> PlacedVisit:
    if placement.auto_stage == AutoStage.AutoIncrement:
        return PlacedVisit(visit, number, None, _device(visit, None, number))
    if visit.ipu is None and placement.strategy is Strategy.SHARDED:
        shard = number - 1  # "if no Stage is specified, the user_id is used", one after another
        return PlacedVisit(visit, shard, None, _device(visit, None, shard))
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
    return PlacedVisit(visit, visit.ipu, None, visit.ipu)


def _named(visit: Visit, placement: Placement) -> PlacedVisit:
    stage = placement.find(visit.block or "")
    if stage is None:
        known = ", ".join(block for named in placement.stages for block in named.blocks)
        raise AssertionFailure(
            f"Unknown Block {visit.block}: no stage of the execution strategy mentions it",
            got=f"known blocks: {known or 'none'}",
            where=visit.line,
            fix="add its id to one of the strategy's stages",
        )
    return PlacedVisit(visit, stage.stage, stage.phase, _device(visit, stage.ipu, stage.stage))


def _device(visit: Visit, fixed: int | None, stage: int) -> int:
    """The strategy's device goes before the block's, and both before the number of the stage."""
    if fixed is not None:
        return fixed
    if visit.ipu is not None:
        return visit.ipu
    log.engine.debug("No IPU specified for block %s: default to stage_id %d", visit.block, stage)
    return stage


def _check_device(placed: PlacedVisit, placement: Placement) -> None:
    if placed.chip < 0:
        raise Error(
            "An IPU id cannot be negative",
            got=f"block {placed.visit.block} on IPU {placed.chip}",
            where=placed.visit.line,
        )
    parallel = placement.strategy is Strategy.PARALLEL_PHASED
    if parallel and placed.phase is not None and (placed.phase - placed.chip) % 2:
        raise Error(
            "In parallel phased execution even phases must run on even IPUs and odd phases on odd "
            "IPUs",
            got=f"block {placed.visit.block} of phase {placed.phase} on IPU {placed.chip}",
            where=placed.visit.line,
            fix="choose the devices with strategy.phase(i).ipus(...) or Stage(...).ipu(n)",
        )
