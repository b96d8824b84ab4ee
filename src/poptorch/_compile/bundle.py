"""Small weights put together for the update, where there are enough of them to be worth it."""

from __future__ import annotations

from .. import _update
from .._ir import slots
from .._ir.bundle import Bundle
from .._ir.graph import Graph, compose
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec, Spec
from .lower import lower

FEWEST = 16
LARGEST = 1 << 15
"""Elements. Gathering a gradient is one more pass over it, which large weights do not repay."""

Bundled = tuple[Graph, OptimSpec, tuple[Bundle, ...]]


def bundled(micro: Graph, spec: Spec, optim: OptimSpec) -> Bundled:
    """Return the micro step and the optimizer over bundles of small weights, and the bundles.

    All are returned as they are where bundles would not pay, or where something looks at single
    weights: LAMB's norms, anchored tensors, the shares that automatic loss scaling counts, checks
    for floating-point exceptions.
    """
    members = [slot for slot in trained_alone(micro, optim) if slot.numel <= LARGEST]
    alone = (
        optim.algorithm == "lamb"
        or bool(spec.inner_anchors)
        or spec.reduction.automatic_loss_scaling
        or spec.precision.floating_point_exceptions
    )
    if alone or len(members) < FEWEST:
        return micro, optim, ()
    flat, bundles = _update.flatten(optim, members)
    hidden = {slot.key for member in members for slot in (member, slots.gradient(member))}
    parts = [lower(_update.spread(bundles)), micro, lower(_update.gather(bundles))]
    return compose("micro", parts, keep=(Kind.GRADIENT,), drop=hidden), flat, bundles


def trained_alone(micro: Graph, optim: OptimSpec) -> list[Slot]:
    """Return the weights that are trained and changed by nothing but the optimizer."""
    gradients = {s.path: s for s in micro.outputs if s.kind is Kind.GRADIENT}
    changed = {slot.path for slot in micro.outputs if slot.kind is Kind.PARAM}
    trained = {path for group in optim.groups for path in group.params} - changed
    return [
        slot
        for slot in micro.inputs
        if slot.kind is Kind.PARAM
        and slot.path in trained
        and slot.path in gradients
        and gradients[slot.path].dtype == slot.dtype
    ]
