"""Decide which small weights are updated together, in bundles."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _update
from .._ir import slots
from .._ir.bundle import Bundle
from .._ir.graph import Graph, compose
from .._ir.program import Shard
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from .lower import lower

FEWEST = 16  # number of small weights for which a bundle saves time
# elements; gathering a gradient takes a pass over it, which is too expensive for large ones
LARGEST = 1 << 15


@dataclass(frozen=True, eq=False)
class FlatParameters:
    """The graph of a layout over the tensors that are updated together."""

    graph: Graph
    optim: OptimSpec | None  # the optimizer over these tensors; None in inference
    bundles: tuple[Bundle, ...] = ()  # the weights that share a storage
    shards: tuple[Shard, ...] = ()  # the bundles that each process updates only in part


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
