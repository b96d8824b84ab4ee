"""How many devices a placed model needs, and the rules about that number and about batches.

Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._base.errors import Error
from .._ir.spec import Spec, Strategy
from .resolve import PlacedVisit

LIMIT = 64
"""Most devices that one process may use."""


def pipeline_depth(placed: Sequence[PlacedVisit]) -> int:
    """Return the number of forward stages: device switches from device 0 on, plus one."""
    chips = [0, *(item.chip for item in placed)]
    return 1 + sum(before != after for before, after in itertools.pairwise(chips))


def check_batches(depth: int, stages: int, spec: Spec) -> None:
    """Check that there are enough micro-batches to fill the pipeline.

    Args:
        depth: forward stages as the rules count them.
        stages: forward stages that have something to do, which the 1.0 interface counts.
        spec: the settings.

    Raises:
        Error: fewer than 2 * depth - 1 per update in training, than depth per call in inference;
            with the 1.0 interface fewer than stages.
    """
    if spec.placement.strategy is not Strategy.PIPELINED:
        return
    loops, first_release = spec.loops, spec.placement.first_release
    if spec.training:
        needed = stages if first_release else 2 * depth - 1
        if loops.accumulation < needed:
            raise _too_little_accumulation(loops.accumulation, depth, needed, first_release)
        return
    needed = stages if first_release else depth
    if loops.iterations < needed:
        raise Error(
            "deviceIterations must be greater than or equal to the number of pipeline stages "
            f"({needed})",
            got=f"deviceIterations({loops.iterations}) with {needed} stages",
            fix=f"options.deviceIterations({needed}), or use fewer devices",
        )


def _too_little_accumulation(given: int, depth: int, needed: int, first_release: bool) -> Error:
    title = "gradientAccumulation must be greater than or equal to the number of pipeline stages"
    if first_release:
        return Error(
            f"{title} ({needed})",
            got=f"gradient_accumulation={given} with {needed} stages",
            fix=f"gradient_accumulation={needed}, or use fewer devices",
        )
    return Error(
        f"{title} ({needed})",
        got=f"Training.gradientAccumulation({given}) with {depth} forward stages; "
        f"when training there are {depth - 1} additional stages for the backward pass",
        fix=f"options.Training.gradientAccumulation({needed}), or use fewer devices",
    )


def reserve(per_replica: int, spec: Spec) -> int:
    """Return how many devices are to be reserved for all replicas of this process.

    Raises:
        Error: no power of two on hardware without ``autoRoundNumIPUs``, or too many.
    """
    own = -(-per_replica // spec.target.parts)  # of the process that runs most of them
    needed = own * spec.loops.replicas
    _check_limit(needed)
    rounded = 1 << (needed - 1).bit_length() if needed else 0
    if spec.target.device != "ipu" or needed == rounded:
        return needed
    if not spec.target.auto_round:
        raise Error(
            f"The model specifies the use of {needed} IPUs, however PopTorch must reserve a "
            f"minimum of {rounded} in order to allow the model to run, because PopTorch must "
            "reserve a power of 2 or a multiple of 64 IPUs",
            got=f"{own} IPUs per replica, {spec.loops.replicas} replicas",
            fix=f"options.autoRoundNumIPUs(True) to reserve {rounded - needed} more, which idle",
        )
    _check_limit(rounded)
    return rounded


def _check_limit(count: int) -> None:
    if count > LIMIT:
        raise Error(
            f"Too many IPUs requested ({count}): models with more than {LIMIT} IPUs require "
            "distributed execution",
            fix="run several processes with poprun, each with a part of the replicas",
        )
