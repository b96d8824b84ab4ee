"""Decide which weights are updated together: small ones in bundles, and parts of large ones in each
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import _update
from .._base import log
from .._ir import slots
from .._ir.bundle import ALIGNMENT, BUCKET, Bundle
from .._ir.graph import Graph, compose
from .._ir.program import Shard
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from .build import UPDATED
from .lower import lower

FEWEST = 16  # number of small weights for which a bundle saves time
# elements; gathering a gradient takes a pass over it, which is too expensive for large ones
LARGEST = 1 << 15
# elements of a weight that is divided, unless minElementsForReplicatedTensorSharding is set
FEWEST_ELEMENTS = 8192
_BY_ELEMENT = "{}.step does not update every weight element by element"
_WHOLE, _PART = "~whole.", "~part."


@dataclass(frozen=True, eq=False)
class FlatParameters:
    """The graph of a layout over the tensors that are updated together."""

    graph: Graph
    optim: OptimSpec | None  # the optimizer over these tensors; None in inference
    bundles: tuple[Bundle, ...] = ()  # the weights that share a storage
    shards: tuple[Shard, ...] = ()  # the bundles of which each process updates a part


def bundled(
    micro: Graph, spec: Spec, optim: OptimSpec
) -> tuple[Graph, OptimSpec, tuple[Bundle, ...]]:
    members = [slot for slot in trained_alone(micro, optim) if slot.numel <= LARGEST]
    if optim.traced is not None:
        members = _update.equally_updated(optim, members)
    alone = (  # something reads single weights
        optim.algorithm == "lamb"
        or bool(spec.inner_anchors)
        or spec.reduction.automatic_loss_scaling
        or spec.precision.floating_point_exceptions
    )
    if alone or len(members) < FEWEST:
        return micro, optim, ()
    flat, bundles = _update.flatten(optim, members)
    if optim.traced is not None:
        narrow = slots.narrowed if spec.precision.narrow_64bit else slots.unchanged
        over = _update.over_bundles(flat, bundles, narrow)
        if over is None:
            return micro, optim, ()
        flat = over
    hidden = {slot.key for member in members for slot in (member, slots.gradient(member))}
    parts = [lower(_update.spread(bundles)), micro, lower(_update.gather(bundles, micro.gradients))]
    return compose("micro", parts, keep=(Kind.GRADIENT,), drop=hidden), flat, bundles


def trained_alone(micro: Graph, optim: OptimSpec) -> list[Slot]:
    """Return the weights that are trained and changed only by the optimizer."""
    gradients = {slot.path: slot for slot in micro.gradients}
    changed = {slot.path for slot in micro.outputs if slot.kind is Kind.PARAM}
    trained = {path for group in optim.groups for path in group.params} - changed
    trained -= {path for same in optim.common for path in same}
    return [
        slot
        for slot in micro.inputs
        if slot.kind is Kind.PARAM
        and slot.path in trained
        and slot.path in gradients
        and gradients[slot.path].dtype in (slot.dtype, _update.compute_dtype(slot.dtype))
    ]


def sharded(
    micro: Graph, spec: Spec, optim: OptimSpec, by_stages: bool
) -> tuple[OptimSpec, tuple[Shard, ...]]:
    """Return the optimizer over parts of large weights, and the weights that these are parts of.

    Source: PopTorch user guide, "Options" (replicated tensor sharding); Rajbhandari et al., "ZeRO:
    Memory Optimizations Toward Training Trillion Parameter Models", stage 1.
    """
    if not spec.trains_together:
        return optim, ()
    _warn_of_whole(spec)
    if not spec.locations.optimizer.sharded:
        return optim, ()
    least = spec.locations.optimizer.min_sharded
    least = FEWEST_ELEMENTS if least is None else least
    members = [slot for slot in trained_alone(micro, optim) if slot.numel >= max(1, least)]
    small = f"no weight has {least} elements (minElementsForReplicatedTensorSharding)"
    why = _hindrance(spec, optim.clips, by_stages) or ("" if members else small)
    if optim.traced is not None:
        members = _update.equally_updated(optim, members)
        why = why or _hindrance_of_traced(optim, members)
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


def _hindrance_of_traced(optim: OptimSpec, members: Sequence[Slot]) -> str:
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


def _hindrance(spec: Spec, clips: bool, by_stages: bool) -> str:
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
