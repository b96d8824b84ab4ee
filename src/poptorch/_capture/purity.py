"""Turn a traced graph into a pure one: without writes, with the final arithmetic of half types, and
without dead nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx

from .._base import private, source
from .._base.nested_values import dtypes_of, with_tensors
from .._base.thread_safety import holding
from .._ir.block_labels import line_of, note_on
from .._ir.compiler_pass import is_left_out
from .._ir.graph import copied, lazily, remove_dead_nodes
from .._ir.operators import IN_SINGLE, Operator, acts, may_view, writes
from .._ir.symbolic import computes_size, has_symbols
from .._ir.tensors import Tensors
from .._ops import pure_forms
from .._ops.draws import ORDER
from .._ops.effects import is_control_flow, recording
from .._ops.rounding import rounded_at_random
from .drawn_again import reuse
from .whole_writes import IDENTITIES, make_whole_writes_pure

aten = torch.ops.aten
LONE_WRITES, WHOLE_WRITES = "lone writes", "whole writes"


def pure(recorded: fx.GraphModule, mode: Any, stochastic: bool, runs: bool) -> fx.GraphModule:
    """Return a pure graph. Replaying takes two fifths of the time of a capture, and is done only if
    the recorded graph is not pure.
    """
    if not is_left_out(LONE_WRITES):
        _make_lone_writes_pure(recorded.graph)
    if not stochastic and not is_left_out(WHOLE_WRITES):
        make_whole_writes_pure(recorded.graph, mode)
    if not stochastic and all(_stays(node, runs) for node in recorded.graph.nodes):
        result = copied(recorded)
    else:
        rules = _half_rules(stochastic) if runs else {}
        inputs = [node.meta["val"] for node in recorded.graph.find_nodes(op="placeholder")]
        result = _functionalize(recorded, inputs, mode, rules)
    reuse(result.graph)
    _clean(result.graph)
    return result


_PURE = {aten.bernoulli_.float: aten.bernoulli.p, aten.div_.Scalar: aten.div.Scalar}


def _make_lone_writes_pure(graph: fx.Graph) -> None:
    """Make writes pure that overwrite a tensor with no other reader, as dropout does to
    draw its mask.
    """
    made = set[fx.Node]()
    for node in list(graph.nodes):
        pure = _PURE.get(node.target)
        written = node.args[0] if pure is not None else None
        if not isinstance(written, fx.Node) or len(written.users) > 1:
            continue
        if written.target is aten.empty_like.default or written in made:
            if len(node.args) == 1:  # one operator has a default probability, the other has none
                node.args = (written, 0.5)
            node.target = pure
            made.add(_in_order_of_memory(node) if pure is aten.bernoulli.p else node)


def _in_order_of_memory(draw: fx.Node) -> fx.Node:
    """Draw in the order of the write, which follows memory. The pure operator follows
    dimensions.
    """
    value, graph, permute = draw.meta["val"], draw.graph, aten.permute.default
    if value.is_contiguous():
        return draw
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    with graph.inserting_before(draw):
        turned = graph.call_function(permute, (draw.args[0], order))
    with graph.inserting_after(draw):
        back = graph.call_function(permute, (draw, [order.index(dim) for dim in range(len(order))]))
    draw.replace_all_uses_with(back, lambda user: user is not back)
    draw.args, back.meta = (turned, *draw.args[1:]), dict(draw.meta)
    turned.meta = draw.meta = {**draw.meta, "val": value.permute(order)}
    note_on(draw, **{ORDER: order})
    return back


def _stays(node: fx.Node, runs: bool) -> bool:
    if node.op == "output" or (node.target is operator.getitem and not node.users):
        return True  # what an operator was not asked for has no value
    if computes_size(node):
        return True
    known = node.target is operator.getitem or isinstance(node.target, Operator)
    if node.op != "placeholder" and (not known or writes(node) or "val" not in node.meta):
        return False
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(
        hasattr(value, "fake_mode") and not (runs and value.dtype == torch.float16)
        for value in values
        if value is not None
    )


class _Replay(fx.Interpreter):
    """Runs a recorded graph. The memory layout of kernels' results may differ from what torch says
    for tensors without values, and views depend on it.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if pure_forms.foreign(target):
            return pure_forms.call(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if pure_forms.foreign(n.target):
            line = line_of(n)
            pure_forms.check(n.target, source.describe(*line) if line else None)
        result, recorded = super().run_node(n), n.meta.get("val")
        if not isinstance(result, torch.Tensor) or not isinstance(recorded, torch.Tensor):
            return result
        own = not may_view(n) and _is_contiguous(recorded)
        return result.contiguous() if own else result


def _is_contiguous(recorded: torch.Tensor) -> bool:
    if not has_symbols(recorded.shape):
        return recorded.is_contiguous()
    with private.disable_proxy_modes_tracing():  # sizes of the replayed graph are not those here
        return recorded.is_contiguous()


def _functionalize(
    recorded: fx.GraphModule, inputs: Tensors, mode: Any, rules: OperatorRules
) -> fx.GraphModule:
    def replay(*args: torch.Tensor) -> object:
        # Inputs must not be modified, so the function gets copies, which are dropped if they are
        # not needed.
        return _Replay(recorded).run(*(a.clone() for a in args))

    # casts are recorded already and must not be applied again
    as_recorded = torch.autocast("cpu", enabled=False)
    graphs = holding(recording, True)  # loops and branches get these graphs as bodies now
    with lazily(), fx_traceback.preserve_node_meta(), mode, as_recorded, graphs:
        function = torch.func.functionalize(replay, remove="mutations")
        pure: fx.GraphModule = private.traced(function, inputs, rules)
    return pure


def _clean(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        copied_input = (
            node.target is aten.clone.default
            and isinstance(source, fx.Node)
            and source.op == "placeholder"
            and not node.kwargs
            and not any(is_control_flow(user) for user in node.users)
        )
        if node.target in IDENTITIES or copied_input:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    remove_dead_nodes(graph, acts)
    graph.lint()


Round = Callable[[torch.Tensor], torch.Tensor]
OperatorRules = Mapping[Any, Callable[..., Any]]


def _half_rules(stochastic: bool) -> OperatorRules:
    """Return by operator how to compute it instead; ``NotImplemented`` means no change."""
    narrow: Round = _at_random if stochastic else torch.Tensor.half
    table = {operator: _in_single(operator, half, narrow) for operator, half in IN_SINGLE.items()}
    if stochastic:
        table |= {
            aten._to_copy.default: _cast,
            aten.copy.default: _copied,
            aten._native_batch_norm_legit_functional.default: _batch_norm,
        }
    return table


def _in_single(operator: Any, half: tuple[int, ...] | None, narrow: Round) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if torch.float16 not in dtypes_of((args, kwargs)):
            return NotImplemented
        args, kwargs = with_tensors(_widened, (args, kwargs))
        results = operator(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return narrow(results)
        return tuple(
            narrow(value) if value is not None and (half is None or at in half) else value
            for at, value in enumerate(results)
        )

    return compute


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32) if value.dtype == torch.float16 else value


def _at_random(value: torch.Tensor) -> torch.Tensor:
    return rounded_at_random(value, torch.float16)


def _batch_norm(value: torch.Tensor, *args: Any) -> Any:
    # For the half kernel, torch claims that running statistics are float32, which is wrong.
    half = isinstance(args[2], torch.Tensor) and args[2].dtype == torch.float16
    return _batch_norm_in_single(value, *args) if half else NotImplemented


_batch_norm_in_single = _in_single(
    aten._native_batch_norm_legit_functional.default, (0, 1, 2), torch.Tensor.half
)


def _cast(value: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype != torch.float16 or value.dtype != torch.float32:
        return NotImplemented
    return _at_random(value)


def _copied(target: torch.Tensor, value: torch.Tensor, *_: bool) -> Any:
    if target.dtype != torch.float16 or value.dtype != torch.float32:
        return NotImplemented
    return aten.copy.default(target, _at_random(value))
