"""Run optimizer steps in the interpreter with one call of torch's kernels for many weights.

A step for which torch has no kernel is written out in operators. The results for SGD are
bit-identical to the written-out operators, and those for Adam to torch's fused kernel. Time of a
step relative to eager PyTorch, with and without these calls, on one thread: 0.95 and 3.1 for an
MLP, 0.99 and 1.2 for a BERT with 4 layers, 0.99 and 1.1 with bfloat16 weights.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ops.optimizer_formulas import ADAM, BY_OPERATOR, SGD, Operands, is_constant, with_decay
from .._ops.written_out import erase, insert, write_out

aten = torch.ops.aten

_ADAM, _SGD = ("fused_adamw_",), ("foreach_mul_", "foreach_addcmul_", "foreach_add_")
_LATE = torch.tensor(1e30, dtype=torch.float32, device="cpu")  # step at which corrections are 1


@dataclass(frozen=True)
class _Kernel:
    """A function that makes the steps of several weights in place, given lists and numbers."""

    call: Callable[..., None]
    needs: tuple[str, ...]  # private names of torch
    moments: tuple[str, ...]
    numbers: tuple[str, ...]
    casts: bool = False  # whether weights and gradients may have half types

    def takes(self, given: Operands) -> bool:
        plain = tuple(given.moments) == self.moments
        plain = plain and is_constant(given.numbers.get("nesterov", 0.0), 0)
        return plain and all(private.optional(name) is not None for name in self.needs)


@dataclass(frozen=True)
class _KernelStep:
    """A step that a kernel runs."""

    kernel: _Kernel
    node: fx.Node
    given: Operands
    place: fx.Node  # the stored weight
    writes: tuple[fx.Node, ...]  # the nodes that write the new weight and its new moments


def fuse_steps(module: fx.GraphModule) -> fx.GraphModule:
    """Replace the steps in a prepared graph by kernel calls or operators; return the module."""
    graph = module.graph
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    taken = [each for copy in copies if (each := _kernel_step(copy)) is not None]
    alike: dict[Any, list[tuple[fx.Node, ...]]] = {}
    for each in taken:
        tensors = each.place, _gradient(each), *each.given.moments.values()
        scalars = tuple(each.given.numbers[name] for name in each.kernel.numbers)
        kind = each.kernel, each.place.meta["val"].dtype, scalars
        alike.setdefault(kind, []).append(tensors)
    if taken:
        with graph.inserting_before(copies[0]):  # after all values, before all writes
            for (kernel, _, scalars), same in alike.items():
                lists = map(list, zip(*same, strict=True))
                graph.call_function(kernel.call, (*lists, *scalars))
    for each in taken:
        _erase(each)
    write_out(graph)
    module.recompile()
    return module


def _kernel_step(copy: fx.Node) -> _KernelStep | None:
    """Return the step whose new weight a node writes, if a kernel can run it."""
    place: Any
    stored: Any
    place, stored = copy.args
    result = stored.args[0] if _is_cast(stored) else stored
    if result.target is not operator.getitem or result.args[1] != 0:
        return None
    node = result.args[0]
    kernel = KERNELS.get(node.target)
    if kernel is None:
        return None
    given = BY_OPERATOR[node.target].operands(node.args)
    is_place = given.weight is place or (kernel.casts and _before_cast(given.weight) is place)
    tensors = [given.weight, *given.moments.values()]
    if is_constant(given.numbers["weight_decay"], 0):
        tensors.append(given.gradient)
    writes = _writes(node, (place, *given.moments.values()))
    if not (writes and is_place and kernel.takes(given) and _can_share_kernel(tensors)):
        return None
    return _KernelStep(kernel, node, given, place, writes)


def _writes(node: fx.Node, places: Sequence[Any]) -> tuple[fx.Node, ...]:
    """Return the nodes that write a step's results; none if a result has another reader.

    A new weight may be cast before it is written.
    """
    results = {user.args[1]: user for user in node.users}
    writes: list[fx.Node] = []
    for at, place in enumerate(places):
        readers = [*results[at].users] if at in results else []
        if at == 0 and len(readers) == 1 and _is_cast(readers[0]):
            readers = [*readers[0].users]
        if len(readers) != 1 or readers[0].target is not aten.copy_.default:
            return ()
        if readers[0].args[0] is not place:
            return ()
        writes += readers
    return tuple(writes)


def _gradient(taken: _KernelStep) -> Any:
    """Return the gradient that a kernel reads: with weight decay, or before the cast to float32."""
    given = taken.given
    decay = given.numbers["weight_decay"]
    if not is_constant(decay, 0):
        (decayed,) = insert(taken.node, with_decay, given.gradient, given.weight, decay)
        return decayed
    return given.gradient if given.weight is taken.place else _before_cast(given.gradient)


def _erase(taken: _KernelStep) -> None:
    """Erase a step with its writes, and the casts around it that nothing else reads."""
    of_step = {taken.node, *taken.node.users}
    for write in taken.writes:
        erase(write, lambda operand: operand in of_step or _is_cast(operand))


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default


def _before_cast(node: fx.Node) -> Any:
    widened = _is_cast(node) and node.kwargs == {"dtype": torch.float32}
    return node.args[0] if widened else node


def _can_share_kernel(nodes: Iterable[Any]) -> bool:
    """Return whether the kernels accept these tensors together."""
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
    """Update velocities with the gradients and weights with the velocities, in place.

    ``scalars``: the factor of the old velocity, the factor of the gradient that is added to it,
    and the factor of the velocity that is added to the weight.
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
    """Update the moments with the gradients and the weights with the moments, in place.

    ``scalars``: the weight of the gradient in the first moment and of its square in the second
    moment; the factor of the second moment's root, and what is added to it; the factor of the
    quotient of the moments, and the factor of the old weight.
    """
    numbers = first_share, second_share, factor, eps, descent, shrink = [*map(float, scalars)]
    # Torch's kernel divides by 1 - beta ** step.
    assert 0 < first_share <= 1, "the first beta must be at least 0 and less than 1"
    assert 0 < second_share <= 1, "the second beta must be at least 0 and less than 1"
    rows = zip(weights, gradients, firsts, seconds, strict=True)
    # One weight at a time, so that its float32 copy stays in the caches.
    if weights[0].dtype is not torch.float32:
        for weight, gradient, first, second in rows:
            wide = weight.float()
            adam_step([wide], [gradient.float()], [first], [second], *numbers)
            weight.copy_(wide)
        return
    rate = -descent / factor  # the quotient, reduced by the root's factor
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


KERNELS = {
    ADAM.operator: _Kernel(
        adam_step,
        _ADAM,
        ("first", "second"),
        ("first_share", "second_share", "root_factor", "eps", "descent", "shrink"),
        casts=True,
    ),
    SGD.operator: _Kernel(sgd_step, _SGD, ("velocity",), ("momentum", "share", "descent")),
}
STEPS = frozenset(kernel.call for kernel in KERNELS.values())
