"""Answer questions about the ATen operators of nodes, in one place."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Torch has no public name for the class of operators like aten.add.Tensor.
Operator = type(aten.add.Tensor)

# These return the same numbers in another shape.
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
SAME_NUMBERS = RESHAPES | {
    aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default,
}  # fmt: skip
# These read only the shape of their operand.
SHAPE_ONLY = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty.default,
}  # fmt: skip
# Products and convolutions of float16 tensors are computed in single precision and rounded once. On
# processors without half arithmetic, torch's half kernels are 5 to 80 times slower than those for
# float32. The conversions take almost no time, and the sums are as precise.
# For each operator, the results that have a half type if the operands do; None for all results.
IN_SINGLE: dict[Any, tuple[int, ...] | None] = {
    aten.mm.default: None, aten.addmm.default: None, aten.bmm.default: None,
    aten.baddbmm.default: None, aten.addbmm.default: None, aten.mv.default: None,
    aten.addmv.default: None, aten.dot.default: None, aten.convolution.default: None,
    aten.convolution_backward.default: None, aten._cdist_forward.default: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: None,
    # The half kernels of these sum in half precision.
    aten.logsumexp.default: None, aten.prod.default: None, aten.prod.dim_int: None,
}  # fmt: skip
# These fill a tensor at random, without reading its values.
_FILL_AT_RANDOM = {
    aten.rand_like, aten.randn_like, aten.randint_like, aten.uniform, aten.uniform_, aten.normal_,
    aten.normal_functional, aten.exponential, aten.exponential_, aten.random, aten.random_,
    aten.geometric, aten.geometric_, aten.cauchy, aten.cauchy_, aten.log_normal, aten.log_normal_,
}  # fmt: skip
_BERNOULLI_OF_A_NUMBER = {aten.bernoulli.p, aten.bernoulli_.float}
# These may return views, although their schemas do not say so.
_MAY_VIEW = {
    aten.reshape.default, aten.contiguous.default, aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default,
}  # fmt: skip


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, Operator) and bool(node.target._schema.is_mutable)


def written_by(node: fx.Node) -> list[fx.Node]:
    if not writes(node):
        return []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    given |= node.kwargs
    changed = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    values = (given.get(name) for name in changed)
    return [value for value in values if isinstance(value, fx.Node)]


def arguments_written(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors to which a call of an operator writes."""
    if not isinstance(target, Operator) or not target._schema.is_mutable:
        return
    for at, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, torch.Tensor):
                    yield each


def draws(node: fx.Node) -> bool:
    target = node.target
    may_draw = isinstance(target, Operator) and _may_draw(target)
    return may_draw and call_draws(target, node.args, node.kwargs)


def call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws at random. Torch marks attention as random, but it only draws
    with dropout.
    """
    if not isinstance(target, Operator) or not _may_draw(target):
        return False
    dropout = _given(target, args, kwargs, "dropout_p")
    return dropout is None or bool(dropout)


@functools.cache  # reading tags takes longer
def _may_draw(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def generator_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the generator of a call or node, or None for the default generator."""
    return _given(target, args, kwargs, "generator")


def _given(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return args[at] if at < len(args) else kwargs.get(name, argument.default_value)
    return None


def draws_unseen(target: Any, args: Sequence[Any]) -> bool:
    """Return whether a draw depends only on the random state, shapes and numbers."""
    places = [at for at, each in enumerate(args) if isinstance(each, (torch.Tensor, fx.Node))]
    fills = target.overloadpacket in _FILL_AT_RANDOM or target in _BERNOULLI_OF_A_NUMBER
    return not places or (places == [0] and fills)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether it has one result, each element of which depends on the elements at
    its position.
    """
    return isinstance(node.target, Operator) and computes_elements(node.target)


@functools.cache
def computes_elements(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags and len(target._schema.returns) == 1


def makes_elements(target: Any) -> bool:
    """Return whether it is pointwise and its result has new memory. Some operators return their
    operand.
    """
    pointwise = isinstance(target, Operator) and computes_elements(target)
    return pointwise and not shares_memory(target)


def name_of(node: fx.Node) -> str:
    """Return the name of what a node calls: ``aten.add`` for all overloads, or the name of
    a function.
    """
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet or getattr(node.target, "__name__", node.target))


def acts(node: fx.Node) -> bool:
    """Return whether a node has an effect. Random operators are pure here, so an unused draw may be
    removed.
    """
    if node.op in ("placeholder", "output"):
        return True
    return writes(node) or node.is_impure(impure_random=False)


def is_mask(node: fx.Node) -> bool:
    """Return whether a value was drawn at random, and perhaps scaled, so that its seed is enough to
    repeat it.
    """
    inputs = node.all_input_nodes
    return node.op == "call_function" and (draws(node) or (len(inputs) == 1 and draws(inputs[0])))


def bodies(node: fx.Node) -> list[fx.Graph]:
    """Return the graphs in a loop or branch."""
    names = [str(a.target) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    parts = (getattr(node.graph.owning_module, name) for name in names)
    return [part.graph for part in parts if isinstance(part, fx.GraphModule)]


def reachable(start: Iterable[Any], parents: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """Return some nodes, of any graph, and everything that can be reached from them through
    ``parents``.
    """
    found: set[Any] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(parents(node))
    return found


def functions_before(function: Any) -> list[Any]:
    """Return the autograd functions that follow a function in the backward pass."""
    return [parent for parent, _ in function.next_functions if parent is not None]


def may_view(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:  # one of several results, for example of a split
        return True
    return isinstance(target, Operator) and shares_memory(target)


@functools.cache  # reading a schema takes as long as creating a node
def shares_memory(target: Any) -> bool:
    if target in _MAY_VIEW:
        return True
    first = target._schema.arguments[:1]
    return bool(first) and first[0].alias_info is not None


@functools.cache
def view_of(target: Any) -> Any:
    """Return the view operator if an operator makes a copy of a view, as in bodies of loops; else
    the operator.
    """
    if not isinstance(target, Operator) or target.namespace != "aten":
        return target
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    if not packet.endswith("_copy"):
        return target
    view = getattr(getattr(aten, packet.removesuffix("_copy"), None), overload, None)
    shares = view is not None and view._schema.returns[0].alias_info is not None
    return view if shares else target


def of_shape(node: fx.Node) -> Any:
    """Compute a node that only reads a shape, with an operand of any contents."""
    like = node.all_input_nodes[0].meta["val"]
    operand = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    args, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda size: size.meta["val"])
    return node.target(operand, *args, **kwargs)  # type: ignore[operator]


def storage_root(node: fx.Node) -> fx.Node:
    """Return the node whose storage the result of a node may share, following views backwards."""
    while node.op == "call_function" and may_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def storage_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return ``storage_root`` of all nodes of a graph, which are in order."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        viewed = node.args[0] if node.op == "call_function" and may_view(node) else None
        roots[node] = roots[viewed] if isinstance(viewed, fx.Node) else node
    return roots
