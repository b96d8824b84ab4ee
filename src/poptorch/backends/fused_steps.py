"""Steps of SGD with momentum and of Adam as calls for many weights, for the interpreter.

Bits of SGD stay; those of Adam are of torch's fused kernel. A step over eager's with and without
its calls, one thread: MLP 0.95 and 3.1, a BERT of 4 layers 0.99 and 1.2, with bfloat16 weights 0.99
and 1.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir.operators import reachable

aten = torch.ops.aten

_ADAM, _SGD = ("fused_adamw_",), ("foreach_mul_", "foreach_addcmul_", "foreach_add_")
_LATE = torch.tensor(1e30, dtype=torch.float32, device="cpu")  # a step without corrections


@dataclass(frozen=True)
class _Step:
    """The call that computes a step; its tensors, its numbers where they are compiled in."""

    call: Callable[..., None]
    tensors: tuple[fx.Node, ...]
    scalars: tuple[Any, ...]
    inner: Collection[fx.Node]  # what computes it so far


def fuse_steps(module: fx.GraphModule) -> fx.GraphModule:
    """Let alike steps in a prepared graph be one call; return the module, changed."""
    graph = module.graph
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {copy.args[1]: copy for copy in copies}
    steps = [step for copy in copies if (step := _step(copy, written)) is not None]
    if not steps:
        return module
    order = {node: at for at, node in enumerate(graph.nodes)}
    alike: dict[Any, list[tuple[fx.Node, ...]]] = {}
    for step in steps:
        kind = step.call, step.tensors[0].meta["val"].dtype, step.scalars
        alike.setdefault(kind, []).append(step.tensors)
    with graph.inserting_before(copies[0]):  # all that they write is computed, nothing is written
        for (call, _, scalars), same in alike.items():
            lists = map(list, zip(*same, strict=True))
            graph.call_function(call, (*lists, *scalars))
    for step in steps:
        for node in sorted(step.inner, key=order.__getitem__, reverse=True):
            if node in written:
                graph.erase_node(written[node])
            graph.erase_node(node)
    module.recompile()
    return module


def _step(copy: fx.Node, written: Mapping[Any, fx.Node]) -> _Step | None:
    """Return the step (see ``_update``) whose new weight a node writes, if any."""
    for read, kernels in ((_sgd, _SGD), (_adam, _ADAM)):
        step = read(copy.args[0], copy.args[1], written)
        if step is not None and all(private.optional(name) is not None for name in kernels):
            return step
    return None


def _sgd(weight: Any, new_weight: Any, written: Mapping[Any, fx.Node]) -> _Step | None:
    base, new_velocity, descent = _plus_scaled(new_weight)
    kept, gradient, share = _plus_scaled(new_velocity)
    velocity, momentum = _operands(kept, aten.mul.Tensor)
    ends = weight, gradient, velocity
    state = {new_weight: weight, new_velocity: velocity}
    inner = _alone(new_weight, {*ends, momentum, share, descent}, state, written)
    if base is not weight or not inner or not _are_alike(ends):
        return None
    return _Step(sgd_step, ends, (momentum, share, descent), inner)


def _adam(place: Any, result: Any, written: Mapping[Any, fx.Node]) -> _Step | None:
    weight, new_weight = _in_float32(place, result)
    base, quotient, descent = _plus_scaled(new_weight)
    decayed, shrink = (weight, 1.0) if base is weight else _operands(base, aten.mul.Tensor)
    new_first, root = _operands(quotient, aten.div.Tensor)
    corrected, eps = _operands(root, aten.add.Tensor)
    scaled = _operands(corrected, aten.mul.Tensor)
    plain, factor = scaled if scaled[0] is not None else (corrected, 1.0)
    new_second, *_ = _operands(plain, aten.sqrt.default)
    first, gradient, first_share = _blend(new_first)
    second, square, second_share = _blend(new_second)
    if decayed is not weight or _operands(square, aten.mul.Tensor) != (gradient, gradient):
        return None
    scalars = first_share, second_share, factor, eps, descent, shrink
    ends = weight, gradient, first, second
    state = {result: place, new_first: first, new_second: second}
    inner = _alone(result, {*ends, *scalars}, state, written)
    if not inner or not _are_alike(ends):
        return None
    narrow = gradient if weight is place else _before_cast(gradient)
    inner |= {cast for cast in {weight, gradient} - {place, narrow} if set(cast.users) <= inner}
    return _Step(adam_step, (place, narrow, first, second), scalars, inner)


def _alone(
    result: fx.Node, ends: Collection[Any], state: Mapping[Any, Any], written: Mapping[Any, fx.Node]
) -> set[fx.Node]:
    """Return what computes a result from its ends, if only the state's new values are read."""
    if any(new not in written or written[new].args[0] is not old for new, old in state.items()):
        return set()
    inner = reachable([result], lambda node: set(node.all_input_nodes) - set(ends))
    users = {user for node in inner for user in node.users}
    return inner if users <= {*inner, *(written[new] for new in state)} else set()


def _in_float32(place: Any, result: Any) -> tuple[Any, Any]:
    """Return a weight and its new value; of a narrower type, what is computed between casts."""
    if isinstance(result, fx.Node) and result.target is aten._to_copy.default:
        for user in place.users:
            if _before_cast(user) is place:
                return user, result.args[0]
    return place, result


def _before_cast(node: fx.Node) -> Any:
    cast = node.target is aten._to_copy.default and node.kwargs == {"dtype": torch.float32}
    return node.args[0] if cast else node


def _operands(node: Any, target: Any) -> tuple[Any, ...]:
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        return None, None
    return node.args


def _plus_scaled(node: Any) -> tuple[Any, Any, Any]:
    match node:
        case fx.Node(target=aten.addcmul.default, args=(a, b, factor)) if not node.kwargs:
            return a, b, factor
        case fx.Node(target=aten.add.Tensor, args=(a, b), kwargs={"alpha": factor}):
            return a, b, factor
    return None, None, None


def _blend(node: Any) -> tuple[Any, Any, Any]:
    """Return (old, new, share) of ``old + share * (new - old)``."""
    match node:
        case fx.Node(target=aten.lerp.Scalar, args=(old, new, share)):
            return old, new, share
    old, difference, share = _plus_scaled(node)
    new, subtracted = _operands(difference, aten.sub.Tensor)
    return (old, new, share) if subtracted is old else (None, None, None)


def _are_alike(nodes: Iterable[Any]) -> bool:
    """Whether the kernels take them."""
    values = [node.meta.get("val") for node in nodes]
    return all(
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.shape == values[0].shape
        and value.is_contiguous()
        for value in values
    )


def sgd_step(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    velocities: Sequence[torch.Tensor],
    *scalars: torch.Tensor | float,
) -> None:
    """Advance velocities by gradients, and weights by them, in place.

    ``scalars``: the factor of the old velocity, the share of the gradient that enters it, the
    velocity's factor.
    """
    momentum, share, descent = scalars
    _kernel(_SGD[0])(velocities, momentum)
    _advance(velocities, gradients, share)
    _advance(weights, velocities, descent)


def _advance(
    places: Sequence[torch.Tensor], values: Sequence[torch.Tensor], factor: torch.Tensor | float
) -> None:
    if isinstance(factor, torch.Tensor):
        _kernel(_SGD[1])(places, values, [factor] * len(places))
    else:
        _kernel(_SGD[2])(places, values, alpha=factor)


def adam_step(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    firsts: Sequence[torch.Tensor],
    seconds: Sequence[torch.Tensor],
    *scalars: torch.Tensor | float,
) -> None:
    """Advance moments by gradients, and weights by them, in place.

    ``scalars``: the shares of the gradient in ``first`` and of its square in ``second``; factor and
    addend of the root of ``second``; factors of the quotient and of the old weight.
    """
    numbers = first_share, second_share, factor, eps, descent, shrink = [*map(float, scalars)]
    rows = zip(weights, gradients, firsts, seconds, strict=True)
    if weights[0].dtype is not torch.float32:  # one at a time: its wide copy stays in the caches
        for weight, gradient, first, second in rows:
            wide = weight.float()
            adam_step([wide], [gradient.float()], [first], [second], *numbers)
            weight.copy_(wide)
        return
    if not (0 < first_share <= 1 and 0 < second_share <= 1):  # it takes no decay of 1
        for weight, gradient, first, second in rows:
            first.add_(gradient - first, alpha=first_share)
            second.add_(gradient * gradient - second, alpha=second_share)
            weight.mul_(shrink).addcdiv_(first, second.sqrt() * factor + eps, value=descent)
        return
    rate = -descent / factor  # numerator and denominator divided by the root's factor
    _kernel(_ADAM[0])(
        weights,
        [gradient.contiguous() for gradient in gradients],
        firsts,
        seconds,
        [],
        [_LATE] * len(weights),
        lr=rate,
        beta1=1 - first_share,
        beta2=1 - second_share,
        weight_decay=(1 - shrink) / rate if rate else 0.0,
        eps=eps / factor,
        amsgrad=False,
        maximize=False,
    )


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(private, name)


STEPS = frozenset({adam_step, sgd_step})
