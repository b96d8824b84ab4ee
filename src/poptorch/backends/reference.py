"""The reference backend: runs a graph operator by operator. It defines what programs mean.

Steps of Adam of large weights are torch's kernel for ``fused=True``: a dozen operators that each
read and write tensors as large as the weights take longer than eager's optimizer (processor time of
a step over eager's: MLP 0.91 with it and 3.1 without, a BERT of 4 layers 1.0 and 1.2). Smaller
ones, and bundles, which are flat, stay with the operators: a weight has the same bits in both.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir.graph import Graph
from .._ir.plan import Plan
from . import stopwatch
from .driver import LoopExecutable, program_report
from .prepare import accept_strides, prepare, signature
from .protocol import Compiled, Executable, Progress

aten = torch.ops.aten

LARGE = 1 << 16  # more than any weight of a bundle has
_LATE = 1e30  # the number of a step whose moments need no correction


class Reference:
    """Compiles in no time and needs nothing but torch."""

    name = "reference"
    executable = LoopExecutable

    def unavailable(self) -> str | None:
        return None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        start = time.perf_counter()
        functions = {
            name: (signature(graph), self.interpreted(graph))
            for name, graph in plan.program.graphs.items()
        }
        progress(1.0)
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        return self.executable(plan, functions, report)

    def interpreted(self, graph: Graph) -> Compiled:
        return self.function(prepare(graph).module)

    @staticmethod
    def function(module: fx.GraphModule) -> Compiled:
        """Return what runs one prepared graph, which is changed."""
        module = accept_strides(fuse_adam(module))
        forward = fx.GraphModule(module, module.graph).forward  # not module(...): it has no hooks

        def run(arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return stopwatch.run(module, forward, arguments)  # type: ignore[no-any-return]

        return run


# The arguments of ``adam_step``: nodes, and numbers where they are compiled in; what computes it.
_Step = tuple[tuple[Any, ...], Collection[fx.Node]]


def fuse_adam(module: fx.GraphModule) -> fx.GraphModule:
    """Let each large step of Adam in a prepared graph be one kernel; return the module, changed."""
    graph = module.graph
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {copy.args[1]: copy for copy in copies}
    steps = [step for copy in copies if (step := _step(copy, written)) is not None]
    if not steps or private.optional("fused_adamw_") is None:
        return module
    order = {node: at for at, node in enumerate(graph.nodes)}
    with graph.inserting_before(copies[0]):  # all that they write is computed, nothing is written
        for operands, _ in steps:
            graph.call_function(adam_step, operands)
    for _, inner in steps:
        for node in sorted(inner, key=order.__getitem__, reverse=True):
            if node in written:
                graph.erase_node(written[node])
            graph.erase_node(node)
    module.recompile()
    return module


def _step(copy: fx.Node, written: Mapping[Any, fx.Node]) -> _Step | None:
    """Return the large step of Adam (see ``_update``) whose new weight a node writes, if any."""
    weight, new_weight = copy.args[:2]
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
    state = {new_weight: weight, new_first: first, new_second: second}
    if any(new not in written or written[new].args[0] is not old for new, old in state.items()):
        return None
    tensors = weight, gradient, first, second
    scalars = first_share, second_share, factor, eps, descent, shrink
    inner = _between(new_weight, {*tensors, *scalars})
    users = {user for node in inner for user in node.users}
    alone = users <= {*inner, *(written[new] for new in state)}
    return ((*tensors, *scalars), inner) if alone and _are_large(tensors) else None


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


def _between(node: Any, ends: Collection[Any]) -> set[fx.Node]:
    inner, ahead = set[fx.Node](), [node]
    while ahead:
        node = ahead.pop()
        if node not in ends and node not in inner:
            inner.add(node)
            ahead += node.all_input_nodes
    return inner


def _are_large(nodes: Collection[fx.Node]) -> bool:
    values = [node.meta.get("val") for node in nodes]
    shape = values[0].shape if isinstance(values[0], torch.Tensor) else ()
    return len(shape) > 1 and all(
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.shape == shape
        and value.numel() >= LARGE
        and value.is_contiguous()
        for value in values
    )


def adam_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *scalars: torch.Tensor | float,
) -> None:
    """Advance moments by a gradient, and a weight by them, in place.

    Args:
        weight, gradient, first, second: of one shape; the moments are the gradient's and its
            square's.
        scalars: the share of the gradient in ``first``, and of its square in ``second``; what the
            root of ``second`` is multiplied by, and what is added; the factor of the quotient in
            what is added to the weight; and that of the weight before.
    """
    first_share, second_share, factor, eps, descent, shrink = map(float, scalars)
    if not (0 < first_share <= 1 and 0 < second_share <= 1):  # it takes no decay of 1
        first.add_(gradient - first, alpha=first_share)
        second.add_(gradient * gradient - second, alpha=second_share)
        weight.mul_(shrink).addcdiv_(first, second.sqrt() * factor + eps, value=descent)
        return
    rate = -descent / factor  # numerator and denominator divided by the root's factor
    private.fused_adamw_(
        [weight],
        [gradient.contiguous()],
        [first],
        [second],
        [],
        [_late()],
        lr=rate,
        beta1=1 - first_share,
        beta2=1 - second_share,
        weight_decay=(1 - shrink) / rate if rate else 0.0,
        eps=eps / factor,
        amsgrad=False,
        maximize=False,
    )


@functools.cache
def _late() -> torch.Tensor:
    return torch.tensor(_LATE, dtype=torch.float32)
