"""How many devices a placed model needs, and the rules about that number and about batches.

Source: PopTorch user guide, "Parallel execution".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._base.errors import Error
from .._ir.placement import Strategy
from .._ir.spec import Spec
from .resolve import PlacedVisit

LIMIT = 64
"""Most devices that one process may use."""


def pipeline_depth(placed: Sequence[PlacedVisit]) -> int:
    """Return the number of forward stages: device switches from device 0 on, plus one."""
    chips = [0, *(item.chip for item in placed)]
    return 1 + sum(before != after for before, after in itertools.pairwise(chips))


def check_batches(depth: int, spec: Spec) -> None:
    """Check that there are enough micro-batches to fill the pipeline.

    Raises:
        Error: fewer than 2 * depth - 1 per update in training, than depth per call in inference.
    """
    if spec.placement.strategy is not Strategy.PIPELINED:
        return
    loops = spec.loops
    if spec.training and loops.accumulation < 2 * depth - 1:
        raise Error(
            "gradientAccumulation must be greater than or equal to the number of pipeline stages "
            f"({2 * depth - 1})",
            got=f"Training.gradientAccumulation({loops.accumulation}) with {depth} forward stages; "
            f"when training there are {depth - 1} additional stages for the backward pass",
            fix=f"options.Training.gradientAccumulation({2 * depth - 1}), or use fewer devices",
        )
    if not spec.training and loops.iterations < depth:
        raise Error(
            "deviceIterations must be greater than or equal to the number of pipeline stages "
            f"({depth})",
            got=f"deviceIterations({loops.iterations}) with {depth} stages",
            fix=f"options.deviceIterations({depth}), or use fewer devices",
        )


def reserve(per_replica: int, spec: Spec) -> int:
    """Return how many devices are to be reserved for all replicas of this process.

    Raises:
        Error: no power of two on hardware without ``autoRoundNumIPUs``, or too many.
    """
    needed = per_replica * spec.loops.replicas
    _check_limit(needed)
    rounded = 1 << (needed - 1).bit_length() if needed else 0
    if spec.target.device != "ipu" or needed == rounded:
        return needed
    if not spec.target.auto_round:
        raise Error(
            f"The model specifies the use of {needed} IPUs, however PopTorch must reserve a "
            f"minimum of {rounded} in order to allow the model to run, because PopTorch must "
            "reserve a power of 2 or a multiple of 64 IPUs",
            got=f"{per_replica} IPUs per replica, {spec.loops.replicas} replicas",
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
