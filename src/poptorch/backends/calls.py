"""Fewer calls for the interpreter: how it rewrites a prepared graph.

Bits stay, but for steps of Adam, which have those of torch's fused kernel. A step over eager's with
and without them, one thread: MLP 0.95 and 3.1, a BERT of 4 layers 0.99 and 1.2, with bfloat16
weights 0.99 and 1.1.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir.operators import Operator, may_view, reachable, storage_root

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_LATE = torch.tensor(1e30, dtype=torch.float32, device="cpu")  # a step without corrections


def with_fewer_calls(module: fx.GraphModule) -> fx.GraphModule:
    fuse_adam(module)
    _leave_out_transposes(module.graph)
    _compute_in_place(module.graph)
    module.recompile()
    return module


def _leave_out_transposes(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        (source,) = node.args
        if source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.target is not aten.t.default)


class _Storages:
    """Which values of a graph share memory, and when each is read last."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.root = {node: storage_root(node) for node in graph.nodes}
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        for node, root in self.root.items():
            self._parts.setdefault(root, []).append(node)

    def readers(self, node: fx.Node) -> set[fx.Node]:
        return {user for part in self._parts[self.root[node]] for user in part.users}

    def compute_into(self, value: fx.Node, place: fx.Node, last: fx.Node) -> bool:
        """Compute a value where another lies that nothing reads after it but ``last``."""
        into = _writing(value, place)
        if into is None or self.root[value] is not value:
            return False
        shared = [n for n in value.all_input_nodes if self.root[n] is self.root[place]]
        late = any(self.order[n] > self.order[value] for n in self.readers(place) - {last})
        if late or any(node is not place for node in shared):
            return False  # the second: elements are read at other places than they are written
        value.target, value.kwargs = into, {**value.kwargs, "out": place}
        root = self.root[place]
        for part in self._parts.pop(value):
            self.root[part] = root
            self._parts[root].append(part)
        return True


def _compute_in_place(graph: fx.Graph) -> None:
    """Compute new values where they are kept, and others where an operand lies that is not needed.

    What is kept changes only after the last operator that may fail: a call that fails changes
    nothing.
    """
    storages = _Storages(graph)
    order = storages.order
    last = max((at for node, at in order.items() if not _cannot_fail(node)), default=-1)
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        place, value = copy.args
        is_returned = any(user.op == "output" for user in storages.readers(value))
        late = order.get(value, -1) > last and not is_returned
        if late and storages.compute_into(value, place, copy):
            graph.erase_node(copy)
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            fresh = _is_fresh(operand) and _is_fresh(storages.root[operand])
            if fresh and storages.compute_into(node, operand, node):
                break


def _is_fresh(node: fx.Node) -> bool:
    """Whether an operator's result is memory of its own; some return their operand."""
    own = _is_pointwise(node) and not may_view(node)
    return node.target in _PRODUCTS or (own and node.target is not aten.conj_physical.default)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, Operator) and torch.Tag.pointwise in node.target.tags


def _cannot_fail(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is adam_step:
        return True
    return _is_pointwise(node) or may_view(node) or node.target is aten.copy_.default


def _writing(node: fx.Node, place: fx.Node) -> Any:
    """Return the form of a pointwise operator that writes its result into a tensor like it."""
    if not _is_pointwise(node) or may_view(node) or "out" in node.kwargs:
        return None
    values = node.meta.get("val"), place.meta.get("val")
    own, kept = ((v.dtype, v.shape, v.stride()) if v is not None else None for v in values)
    if own is None or own != kept:
        return None
    target: Any = node.target
    given = [(each.name, str(each.type)) for each in target._schema.arguments]
    for name in (f"{str(target).rpartition('.')[2]}_out", "out"):
        into = getattr(target.overloadpacket, name, None)
        if into is not None:
            taken = [(each.name, str(each.type)) for each in into._schema.arguments]
            if taken == [*given, ("out", "Tensor")]:
                return into
    return None


# The arguments of ``adam_step``: nodes, and numbers where they are compiled in; what computes it.
_Step = tuple[tuple[fx.Node, ...], tuple[Any, ...], Collection[fx.Node]]


def fuse_adam(module: fx.GraphModule) -> fx.GraphModule:
    """Let steps of Adam in a prepared graph be one call; return the module, changed."""
    graph = module.graph
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {copy.args[1]: copy for copy in copies}
    steps = [step for copy in copies if (step := _step(copy, written)) is not None]
    if not steps or private.optional("fused_adamw_") is None:
        return module
    order = {node: at for at, node in enumerate(graph.nodes)}
    alike: dict[Any, list[tuple[fx.Node, ...]]] = {}
    for tensors, scalars, _ in steps:
        alike.setdefault((tensors[0].meta["val"].dtype, scalars), []).append(tensors)
    with graph.inserting_before(copies[0]):  # all that they write is computed, nothing is written
        for (_, scalars), same in alike.items():
            lists = map(list, zip(*same, strict=True))
            graph.call_function(adam_step, (*lists, *scalars))
    for *_, inner in steps:
        for node in sorted(inner, key=order.__getitem__, reverse=True):
            if node in written:
                graph.erase_node(written[node])
            graph.erase_node(node)
    module.recompile()
    return module


def _step(copy: fx.Node, written: Mapping[Any, fx.Node]) -> _Step | None:
    """Return the step of Adam (see ``_update``) whose new weight a node writes, if any."""
    place: Any
    place, result = copy.args[:2]
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
    state = {result: place, new_first: first, new_second: second}
    if any(new not in written or written[new].args[0] is not old for new, old in state.items()):
        return None
    alike = _are_alike((weight, gradient, first, second))
    narrow = gradient if weight is place else _before_cast(gradient)
    tensors = place, narrow, first, second
    scalars = first_share, second_share, factor, eps, descent, shrink
    ends = {weight, gradient, first, second, *scalars}
    inner = reachable([result], lambda node: set(node.all_input_nodes) - ends)
    inner |= {cast for cast in {weight, gradient} - {place, narrow} if set(cast.users) <= inner}
    users = {user for node in inner for user in node.users}
    alone = users <= {*inner, *(written[new] for new in state)}
    return (tensors, scalars, inner) if alone and alike else None


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


def _are_alike(nodes: Collection[fx.Node]) -> bool:
    """Whether the kernel takes them."""
    values = [node.meta.get("val") for node in nodes]
    return all(
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.shape == values[0].shape  # type: ignore[union-attr]
        and value.is_contiguous()
        for value in values
    )


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
    if weights[0].dtype is not torch.float32:  # one at a time: its wide copy stays in the caches
        for weight, gradient, first, second in zip(
            weights, gradients, firsts, seconds, strict=True
        ):
            wide = weight.float()
            adam_step([wide], [gradient.float()], [first], [second], *numbers)
            weight.copy_(wide)
        return
    if not (0 < first_share <= 1 and 0 < second_share <= 1):  # it takes no decay of 1
        for weight, gradient, first, second in zip(
            weights, gradients, firsts, seconds, strict=True
        ):
            first.add_(gradient - first, alpha=first_share)
            second.add_(gradient * gradient - second, alpha=second_share)
            weight.mul_(shrink).addcdiv_(first, second.sqrt() * factor + eps, value=descent)
        return
    rate = -descent / factor  # numerator and denominator divided by the root's factor
    _kernel()(
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
def _kernel() -> Any:
    return private.fused_adamw_
