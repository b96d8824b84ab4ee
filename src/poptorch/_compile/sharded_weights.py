"""Decide which large weights are divided. Each process updates a part, and the optimizer state is
sharded.

Source: PopTorch user guide, "Options" (replicated tensor sharding); Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import _update
from .._base import log
from .._ir import slots
from .._ir.bundle import ALIGNMENT, BUCKET
from .._ir.graph import Graph
from .._ir.program import Shard
from .._ir.slots import Slot
from .._ir.spec import OptimSpec, Spec
from .build import UPDATED
from .bundled_weights import trained_alone

# elements of a weight that is divided, unless minElementsForReplicatedTensorSharding is set
FEWEST_ELEMENTS = 8192
_BY_ELEMENT = "{}.step does not update every weight element by element"
_WHOLE, _PART = "~whole.", "~part."


def sharded(
    micro: Graph, spec: Spec, optim: OptimSpec, by_stages: bool
) -> tuple[OptimSpec, tuple[Shard, ...]]:
    """Return the optimizer over parts of large weights, and the weights that these are parts of."""
    if not spec.trains_together:
        return optim, ()
    _warn_of_whole(spec)
    if not spec.locations.optimizer.sharded:
        return optim, ()
    least = spec.locations.optimizer.min_sharded
    least = FEWEST_ELEMENTS if least is None else least
    members = [slot for slot in trained_alone(micro, optim) if slot.numel >= max(1, least)]
    small = f"no weight has {least} elements (minElementsForReplicatedTensorSharding)"
    why = _obstacle(spec, optim.clips, by_stages) or ("" if members else small)
    if optim.traced is not None:
        members = _update.equally_updated(optim, members)
        why = why or _obstacle_of_traced(optim, members)
    if why:
        _warn_that_state_is_whole(why)
        return optim, ()
    processes = spec.loops.processes
    of_each = optim.algorithm == "lamb"  # it needs the norm of each weight
    most = 0 if of_each else BUCKET * processes
    flat, bundles = _update.flatten(optim, members, _WHOLE, processes * ALIGNMENT, most)
    shards = tuple(
        Shard(
            whole, slots.param(f"{_PART}{at}", (whole.slot.numel // processes,), whole.slot.dtype)
        )
        for at, whole in enumerate(bundles)
    )
    parts = {shard.whole.slot.path: shard.part.path for shard in shards}
    groups = [replace(g, params=tuple(parts.get(p, p) for p in g.params)) for g in flat.groups]
    flat = replace(flat, groups=tuple(groups))
    if optim.traced is None:
        return flat, shards
    narrow = slots.narrowed if spec.precision.narrow_64bit else slots.unchanged
    over = _update.over_bundles(flat, [replace(s.whole, slot=s.part) for s in shards], narrow)
    if over is None:
        _warn_that_state_is_whole(_BY_ELEMENT.format(optim.algorithm))
        return optim, ()
    return over, shards


def _obstacle_of_traced(optim: OptimSpec, members: Sequence[Slot]) -> str:
    if not members:
        return _BY_ELEMENT.format(optim.algorithm)
    return (
        f"max_grad_norm is set for {optim.algorithm}, whose step is traced" if optim.clips else ""
    )


def _warn_that_state_is_whole(why: str) -> None:
    log.python.warning(
        (
            "useReplicatedTensorSharding has no effect: every process keeps the complete "
            "optimizer state, because %s"
        ),
        why,
    )


def _obstacle(spec: Spec, clips: bool, by_stages: bool) -> str:
    hindrances = {
        "updated weights or their gradients are anchored": any(
            long.startswith((UPDATED, slots.ACCUMULATED)) for _, long, *_ in spec.anchors
        ),
        "the norm of gradients that are not clipped is anchored": not clips
        and any(long == slots.NORM for _, long, *_ in spec.anchors),
        "automatic loss scaling needs whole gradients": spec.reduction.automatic_loss_scaling,
        "every operator is checked for floating-point exceptions": (
            spec.precision.floating_point_exceptions
        ),
        "updates are rounded stochastically": spec.precision.stochastic_rounding,
        "the staged backend keeps weights on their chips": by_stages,
    }
    return "; ".join(why for why, true in hindrances.items() if true)


def _warn_of_whole(spec: Spec) -> None:
    optimizer, named = spec.locations.optimizer, spec.locations.named.items()
    requested = [name for name, place in named if place.sharded and place is not optimizer]
    if requested:
        log.python.warning(
            (
                "useReplicatedTensorSharding of %s has no effect: only the optimizer state is "
                "divided over processes"
            ),
            " and ".join(requested),
        )
