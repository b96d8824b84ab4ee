"""Lower a pure graph for the code generator: use primitive operators, choose which values are
stored, and write to the state at the end.

torch's compiler would trace the graph again through its autograd layer, and wrap every call in that
layer's checks. Bypassing it, a warm compilation of the tutorial's CNN takes 0.3 s instead of 1.5,
and a call takes 0.03 ms less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .._base import private
from .._ir.graph import graph_module
from .._ir.operators import Operator, is_pointwise, reachable
from .._ir.symbolic import hint, same_sizes
from ..backends.prepare import write_last
from .kernels import Kernels

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]


def fakes(examples: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(example, static_shapes=True) for example in examples]


def lower(
    module: fx.GraphModule,
    places: Sequence[int],
    inputs: Sequence[torch.Tensor],
    rules: Kernels,
    decompositions: Decompositions,
) -> fx.GraphModule:
    """Rewrite a graph in the operators of the code generator, with all writes at its end.

    ``rules``: for an operator of the graph, a faster way to compute it, with any strides.
    ``decompositions``: for an operator anywhere, how others compute it, in torch's form.
    """
    replay = OrderedReplay(module, rules)
    is_symbolic = any(isinstance(size, torch.SymInt) for each in inputs for size in each.shape)
    # Operators without tensors among their operands make tensors with values otherwise.
    without_values = inputs[0].fake_mode if is_symbolic else contextlib.nullcontext()  # type: ignore[attr-defined]
    with torch.no_grad(), without_values:
        function = torch.func.functionalize(lambda *a: replay.run(*a), remove="mutations")
        lowered: fx.GraphModule = private.traced(function, inputs, decompositions)
    lowered.graph.eliminate_dead_code()
    lowered = graph_module(lowered, _without_repeats(lowered.graph))
    _store_before_spreading(lowered.graph)
    _store_before_scaling(lowered.graph)
    write_last(lowered, places)
    return lowered


_MINUS_ZERO = object()


def _without_repeats(graph: fx.Graph) -> fx.Graph:
    """Return a graph that computes equal values once.

    Torch compares arguments with ``==``, so it would also merge operators of 0.0 and -0.0.
    """
    without_repeats = private.optional("fx_graph_cse")
    if without_repeats is None:
        return graph
    _replace_arguments(
        graph, lambda a: _MINUS_ZERO if isinstance(a, float) and repr(a) == "-0.0" else a
    )
    graph = without_repeats(graph)
    _replace_arguments(graph, lambda a: -0.0 if a is _MINUS_ZERO else a)
    return graph


def _replace_arguments(graph: fx.Graph, function: Callable[[Any], Any]) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), function)


_SUMS = {aten.sum.default, aten.sum.dim_IntList}
# minimum number of elements that are computed from each element of a small operand
_LEAST_SPREAD = 8
_COSTLY = {
    aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default, aten.div.Tensor,
    aten.exp.default, aten.log.default, aten.lgamma.default, aten.digamma.default,
    aten.pow.Tensor_Scalar, aten.pow.Scalar,
}  # fmt: skip


def _store_before_spreading(graph: fx.Graph) -> None:
    """Store small results of expensive operators that large pointwise operators use.

    The code generator would compute them again for each element, for example the inverse root of a
    variance. Without this, a step of the tutorial's CNN takes 1.05 times as long.
    """
    chosen: dict[fx.Node, None] = {}

    def computed_with(node: fx.Node) -> list[fx.Node]:
        inside = [n for n in node.all_input_nodes if n not in chosen]
        return inside if _is_computed(node) or node.target in _SPREADING else []

    for node in filter(_is_computed, graph.nodes):
        for source in map(_behind_views, node.all_input_nodes):
            spread = _is_computed(source) and _size(source) * _LEAST_SPREAD <= _size(node)
            if spread and any(n.target in _COSTLY for n in reachable([source], computed_with)):
                chosen[source] = None
    for node in chosen:
        _store(graph, node)


def _store(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta["val"]
    users = list(node.users)
    with graph.inserting_before(node.next):
        sizes = _numbers(graph, node, value.shape, aten.sym_size.int)
        strides = _numbers(graph, node, value.stride(), aten.sym_stride.int)
        kept = graph.call_function(aten.as_strided.default, (node, sizes, strides))
    kept.meta["val"] = value
    for user in users:
        user.replace_input_with(node, kept)


def _store_before_scaling(graph: fx.Graph) -> None:
    """Store results of expensive operators that are scaled by their own norm.

    The code generator would compute them twice: for the norm, and to scale them. The update of
    Adafactor for a BERT with 4 layers takes 0.8 times the time, together with ``small_product``.
    """
    chosen: dict[fx.Node, None] = {}
    for total in graph.nodes:
        if total.target in _SUMS and _size(total) == 1:
            chosen |= dict.fromkeys(_scaled_later(total))
    for node in chosen:
        _store(graph, node)


def _scaled_later(total: fx.Node) -> list[fx.Node]:
    """Return the expensive results that are summed and then used together with their sum."""
    size = _size(total.all_input_nodes[0])

    def inside(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if _is_computed(n) and _size(n) == size]

    def is_measured_and_scaled(node: fx.Node) -> bool:
        of_sum = {user for user in node.users if total in _only_users(user)}
        others = [user for user in node.users if user not in of_sum and _is_computed(user)]
        return bool(of_sum) and any(user in later for user in others)

    within = reachable(inside(total), inside)
    costly = [n for n in within if any(m.target in _COSTLY for m in reachable([n], inside))]
    if size <= _LEAST_SPREAD or not costly:
        return []
    later = reachable([total], lambda node: node.users)
    return [node for node in costly if is_measured_and_scaled(node)]


def _only_users(node: fx.Node) -> set[fx.Node]:
    """Return the user of a node, the user of that one, and so on, as long as there is only one."""
    found: set[fx.Node] = set()
    while len(node.users) == 1:
        (node,) = node.users
        found.add(node)
    return found


def _numbers(graph: fx.Graph, node: fx.Node, numbers: Sequence[Any], read: Any) -> list[Any]:
    """Return sizes or strides as arguments of an operator: symbolic ones are read."""
    found: list[Any] = []
    for dim, number in enumerate(numbers):
        if isinstance(number, torch.SymInt):
            reader = graph.call_function(read, (node, dim))
            reader.meta["val"] = number
            found.append(reader)
        else:
            found.append(number)
    return found


def _is_computed(node: fx.Node) -> bool:
    return is_pointwise(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _size(node: fx.Node) -> int:
    return hint(node.meta["val"].numel())


def _behind_views(node: fx.Node) -> fx.Node:
    while node.target in _SPREADING:
        node = node.all_input_nodes[0]
    return node


# Pointwise operators run in the memory order of their operands. The rules put the batch innermost,
# but the code generator stores values in the order of their logical dimensions. It would transpose
# activations before their next use, and back. Without this, a step of the tutorial's CNN (8
# micro-batches of 16) takes 1.09 times as long. Operators that may not work with any layout get
# their operands in the layout of the trace.

# Correct for every layout of their operands, by their decompositions or because they are views.
_ANY_LAYOUT = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.reshape.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default,
    aten.amin.default, aten.var_mean.correction, aten.mm.default, aten.addmm.default,
    aten.bmm.default, aten.native_group_norm.default, aten.native_group_norm_backward.default,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
}  # fmt: skip
_SPREADING = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.reshape.default, aten.view.default, aten.permute.default,
}  # fmt: skip
_CASTS = {aten._to_copy.default, aten.clone.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost; None if elements overlap or have gaps.

    Asking a permuted value whether it is contiguous would trace two operators, which takes 4 % of
    the time to lower a perceptron.
    """
    sizes, strides = value.shape, value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    if 0 in sizes:
        return tuple(order)
    dense = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != dense:
            return None
        dense *= sizes[d]
    return tuple(order)


class OrderedReplay(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, rules: Kernels) -> None:
        super().__init__(module)
        self._rules = rules

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, Operator):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        kernel = self._rules.get(n.target)
        if kernel is not None and kernel.applies(*args, **kwargs):
            return kernel.compute(*args, **kwargs)
        if n.target in _VIEWS:
            return aten.reshape.default(*args)
        if _is_pointwise(n.target, kwargs):
            return _pointwise(n.target, args, kwargs)
        if n.target not in _ANY_LAYOUT:
            args, kwargs = fx.map_arg((n.args, n.kwargs), self._as_traced)
        return n.target(*args, **kwargs)

    def _as_traced(self, node: fx.Node) -> Any:
        value, traced = self.env[node], node.meta.get("val")
        if not isinstance(traced, torch.Tensor) or same_sizes(traced.stride(), value.stride()):
            return value
        if any(isinstance(size, torch.SymInt) for size in (*traced.shape, *traced.stride())):
            return _in_order(value, traced)
        as_it_was = torch.empty_strided(
            traced.shape, traced.stride(), dtype=value.dtype, device=value.device
        )
        return as_it_was.copy_(value)


def _in_order(value: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """Return a value whose dimensions have the same order in memory as those of the traced value.

    The sizes are those of this trace.
    """
    order = sorted(range(value.dim()), key=lambda dim: (-hint(traced.stride(dim)), dim))
    turned = value.permute(order).contiguous()
    return turned.permute([order.index(dim) for dim in range(value.dim())])


def _is_pointwise(target: Any, kwargs: Mapping[str, Any]) -> bool:
    # draws are assigned to elements in the traced order
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target in _CASTS:
        return kwargs.get("memory_format") in (None, torch.preserve_format)
    return torch.Tag.pointwise in target.tags


def _once(target: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute only once with elements that share memory, for example the repeated parameters of
    distributions.
    """
    once = value[tuple(slice(None if step else 1) for step in value.stride())]
    return target(once, *args, **kwargs).expand(value.shape)


def _pointwise(target: Any, args: Any, kwargs: Any) -> Any:
    leaves: list[Any] = []
    map_aggregate((args, kwargs), leaves.append)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if target in _COSTLY and len(tensors) == 1 and tensors[0] is args[0] and 0 in args[0].stride():
        return _once(target, *args, **kwargs)
    largest = max(tensors, key=lambda t: (t.dim(), t.numel()), default=None)
    order = None if largest is None else memory_order(largest)
    rank = len(order or ())
    if order is None or order == tuple(range(rank)):
        return target(*args, **kwargs)

    def turn(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        return value.reshape((1,) * (rank - value.dim()) + value.shape).permute(order)

    args, kwargs = map_aggregate((args, kwargs), turn)
    return target(*args, **kwargs).permute(tuple(order.index(d) for d in range(rank)))
