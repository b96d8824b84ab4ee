"""Compute buffers that each micro-batch reads from the previous one, after all lanes and before
each.

If a new value is ``a * old + x``, and neither ``a`` nor ``x`` depends on the old value, it can be
computed for any lane from the ``a`` and ``x`` of all lanes. The kind of layer does not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from .._ir.micro_batches import Lanes
from .._ir.operators import SAME_NUMBERS, SHAPE_ONLY, reachable
from .._ir.slots import HALF_TYPES
from .._ir.symbolic import computes_size
from .batched import NotVectorisable, named, nodes_in

aten = torch.ops.aten
_IN_TRAINING = aten._native_batch_norm_legit_functional.default
# For each normalization, the index of the argument that says whether it only uses its own batch.
_TRAINS: dict[Any, int] = {_IN_TRAINING: 5, aten.native_batch_norm_backward.default: 7}


def running_statistic(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the normalization that computes a running statistic, and the node of the old value."""
    if node.target is not operator.getitem:
        return None
    source, at = node.args
    if source.target is not _IN_TRAINING or not source.args[5] or at not in (3, 4):  # type: ignore[union-attr]
        return None
    before = source.args[at]  # type: ignore[union-attr, index]
    return source, before  # type: ignore[return-value]


def reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values affect this node's value."""
    if node.target in SHAPE_ONLY or computes_size(node):
        return []
    in_training = _TRAINS.get(node.target)
    ignored: tuple[int, ...] = ()
    if node.target is aten.copy.default:
        ignored = (0,)
    elif in_training is not None and node.args[in_training]:
        ignored = (3, 4)
    args = [arg for at, arg in enumerate(node.args) if at not in ignored]
    found, statistic = nodes_in([args, node.kwargs]), running_statistic(node)
    return [*found, statistic[1]] if statistic else found


def widened(value: torch.Tensor) -> torch.Tensor:
    """Return a value for computing the changes of many lanes. They are rounded once, and not in
    each lane.
    """
    return value.to(_wide(value.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF_TYPES else dtype


class Affine(NamedTuple):
    """``factor * old + term``: numbers or tensors with lanes in front, or one if all lanes
    are equal.
    """

    factor: Any
    term: Any


# Returns a value, or one of several, with lanes in front and at least this number of dimensions
# after that.
Operand = Callable[[fx.Node, int, Any], torch.Tensor]


class Chain:
    """The nodes between a buffer's old value and the new one."""

    def __init__(self, name: str, old: fx.Node, new: fx.Node) -> None:
        self.name, self.old, self.new = name, old, new
        self.nodes = {old}
        for node in old.graph.nodes:
            if node.op != "output" and not self.nodes.isdisjoint(reads(node)):
                self.nodes.add(node)

    def operands(self) -> set[fx.Node]:
        """Return the nodes from which factor and term are computed, if the change is affine."""

        def parents(node: fx.Node) -> list[fx.Node]:
            if node is self.old or node not in self.nodes:
                return []
            self._check(node)
            return reads(node)

        return reachable([self.new], parents) - self.nodes

    def _check(self, node: fx.Node) -> None:
        own = [at for at, arg in enumerate(node.args) if arg in self.nodes]
        square = node.target is aten.mul.Tensor and len(own) > 1
        affine = node.target in _AFFINE and not square and _APART.get(node.target) not in own
        if not affine and node.target not in _SAME and running_statistic(node) is None:
            raise named(node, f"{self.name} is no longer a multiple of what it was, and a sum")
        before, after = self.old.meta["val"].dtype, node.meta["val"].dtype
        if before.is_floating_point != after.is_floating_point:
            raise named(node, f"it rounds {self.name}")

    def form(self, node: Any, operand: Operand, rank: int = 0) -> Affine:
        if node is self.old:
            return Affine(1, 0)
        if not isinstance(node, fx.Node):
            return Affine(0, node)
        if node not in self.nodes:
            return Affine(0, operand(node, rank, None))
        statistic, rank = running_statistic(node), node.meta["val"].dim()
        if statistic is not None:
            momentum: Any = statistic[0].args[6]
            before = self.form(statistic[1], operand, rank)
            new = Affine(0, operand(statistic[0], rank, node.args[1]))
            return _plus(_times(before, 1 - momentum), _times(new, momentum))
        if node.target in _SAME:
            return self._shaped(node, self.form(reads(node)[0], operand, rank))
        forms = (self.form(arg, operand, rank) for arg in node.args)
        form: Affine = _AFFINE[node.target](node, *forms)
        return form

    def _shaped(self, node: fx.Node, form: Affine) -> Affine:
        before, after = reads(node)[0].meta["val"], node.meta["val"]
        if isinstance(form.factor, torch.Tensor) and before.shape != after.shape:
            raise NotVectorisable(f"it changes the shape of {self.name}")
        if not isinstance(form.term, torch.Tensor):
            return form
        whole = form.term.expand(len(form.term), *before.shape)
        shape = after.shape if before.numel() == after.numel() else before.shape
        return Affine(form.factor, whole.reshape(-1, *shape).to(_wide(after.dtype)))


def _times(form: Affine, factor: Any) -> Affine:
    if _is(factor, 1):
        return form
    return Affine(*(part if _is(part, 0) else part * factor for part in form))


def _plus(left: Affine, right: Affine) -> Affine:
    return Affine(*(_sum(*parts) for parts in zip(left, right, strict=True)))


def _sum(left: Any, right: Any) -> Any:
    return right if _is(left, 0) else left if _is(right, 0) else left + right


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _added(node: fx.Node, left: Affine, right: Affine) -> Affine:
    sign = -1 if node.target is aten.sub.Tensor else 1
    return _plus(left, _times(right, sign * node.kwargs.get("alpha", 1)))  # type: ignore[operator]


def _product(node: fx.Node, left: Affine, right: Affine) -> Affine:
    return _times(right, left.term) if _is(left.factor, 0) else _times(left, right.term)


def _quotient(node: fx.Node, left: Affine, right: Affine) -> Affine:
    return Affine(*(part if _is(part, 0) else part / right.term for part in left))


def _between(node: fx.Node, start: Affine, end: Affine, weight: Affine) -> Affine:
    return _plus(_times(start, 1 - weight.term), _times(end, weight.term))


def _chosen(node: fx.Node, which: Affine, *both: Affine) -> Affine:
    return Affine(*(torch.where(which.term, *parts) for parts in zip(*both, strict=True)))


_SAME = SAME_NUMBERS | {aten.copy.default}
# For each operator, the form of its result by those of its arguments, and which arguments must not
# depend on the old value.
_AFFINE: dict[Any, Callable[..., Affine]] = {
    aten.add.Tensor: _added,
    aten.sub.Tensor: _added,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.neg.default: lambda node, form: _times(form, -1),
    aten.lerp.Scalar: _between,
    aten.lerp.Tensor: _between,
    aten.where.self: _chosen,
}
_APART: dict[Any, int] = {aten.div.Tensor: 1, aten.lerp.Tensor: 2, aten.where.self: 0}


# Both take the old value with shape (replicas, ...), and the form of a step.


def after_all(old: torch.Tensor, form: Affine, lanes: Lanes) -> torch.Tensor:
    """Return ``a_n ... a_1 old + sum_l a_n ... a_(l+1) x_l``."""
    factor, term = (_in_steps(part, lanes) for part in form)
    if isinstance(factor, torch.Tensor):
        return _by_products(old, factor, term)
    kept: torch.Tensor = old * factor**lanes.steps
    if _is(term, 0):
        return kept
    if not isinstance(term, torch.Tensor) or len(term) == 1:
        once = term[0] if isinstance(term, torch.Tensor) else term
        return kept + once * sum(factor**age for age in range(lanes.steps))  # type: ignore[no-any-return]
    if _is(factor, 0):
        return term[-1].expand_as(old)
    if not _is(factor, 1):
        ages = torch.arange(lanes.steps - 1, -1, -1, dtype=old.dtype, device=old.device)
        term = term * (factor**ages).reshape(-1, *[1] * old.dim())
    return kept + term.sum(0, dtype=term.dtype)  # type: ignore[no-any-return]


def _by_products(old: torch.Tensor, factor: torch.Tensor, term: Any) -> torch.Tensor:
    later = factor.flip(0).cumprod(0).flip(0)  # the product over this step and all later ones
    kept = later[0] * old
    if _is(term, 0):
        return kept
    after = torch.cat([later[1:], torch.ones_like(later[:1])])
    return kept + (after * term).sum(0)  # type: ignore[no-any-return]


def before_each(old: torch.Tensor, form: Affine, lanes: Lanes) -> torch.Tensor:
    """Return what each lane reads, with lanes in front."""
    factor, term = (_in_steps(part, lanes) for part in form)
    if isinstance(factor, torch.Tensor):
        raise NotVectorisable("the factor of its earlier value differs between micro-batches")
    shape = (lanes.steps, *old.shape)
    seen = _seen(old, factor, term, shape)
    return seen.to(old.dtype).expand(shape).reshape(-1, *old.shape[1:])


def _seen(old: torch.Tensor, factor: Any, term: Any, shape: tuple[int, ...]) -> torch.Tensor:
    numbers, ends = torch.arange(shape[0], device=old.device), [1] * old.dim()
    alike = not isinstance(term, torch.Tensor) or len(term) == 1
    if _is(factor, 1) and alike:
        return old + numbers.reshape(-1, *ends) * term  # type: ignore[no-any-return]
    if _is(factor, 1):
        return old + (term.cumsum(0, dtype=term.dtype) - term)  # type: ignore[no-any-return]
    if not isinstance(term, torch.Tensor):
        term = torch.full(shape, term, dtype=old.dtype, device=old.device)
    if _is(factor, 0):
        return torch.cat([old[None], term.expand(shape)[:-1]])
    ages = numbers[:, None] - numbers - 1
    shares = torch.where(ages >= 0, factor ** ages.clamp(min=0).to(old.dtype), 0)
    kept: torch.Tensor = (factor ** numbers.to(old.dtype)).reshape(-1, *ends) * old
    return kept + (shares @ term.expand(shape).reshape(shape[0], -1)).reshape(shape)  # type: ignore[no-any-return]


def _in_steps(part: Any, lanes: Lanes) -> Any:
    """Reshape (lanes, ...) to (steps, replicas, ...)."""
    if not isinstance(part, torch.Tensor):
        return part
    return part[None] if len(part) == 1 else part.reshape(lanes.steps, -1, *part.shape[1:])
