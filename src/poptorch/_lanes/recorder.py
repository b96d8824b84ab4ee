"""Record operators that run on tensors without data as nodes at the end of a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .._base.nested_values import with_tensors
from .._ir.known_results import RepeatedCalls, is_repeatable
from .._ir.operators import Operator
from .._ir.symbolic import same_sizes
from .._ops.dispatch import answering
from .size_nodes import SIZES, SizeNodes

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default}
_Order = Callable[..., tuple[int, ...]]
_KINDS = (torch.Tensor, *SIZES)


class WritesInPlace(Exception):  # noqa: N818 (the caller computes it without writes)
    """An operator would write to a tensor, which is not allowed in a pure graph."""


class GraphRecorder:
    """Adds what is computed within ``recording()`` to a graph, and equal computations only once."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sizes = SizeNodes()
        self.like: fx.Node | None = None  # new nodes get the notes of this node
        self._pauses = False
        self._nodes: dict[int, fx.Node] = {}
        self._values: list[Any] = []  # keeps tensors alive, because they are identified by id
        self._made: dict[Any, Any] = {}
        self._orders: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}
        self._repeated: RepeatedCalls | None = None

    def recording(self, mode: Any) -> Any:
        """Return a context in which operators on tensors of a mode are recorded."""
        self._repeated = getattr(mode, "repeated", None) or RepeatedCalls(mode)
        return answering(self._dispatched)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Build another graph within the block, whose tensors this one does not know."""
        self._pauses = True
        try:
            yield
        finally:
            self._pauses = False

    def register(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._values.append(value)

    def copied(self, value: Any, node: fx.Node) -> Any:
        """Return a value that identifies this node. Nodes with equal shapes share theirs."""
        if not isinstance(value, torch.Tensor):
            return value
        with self.paused():
            value = aten.alias.default(value)
        self.register(value, node)
        return value

    def node_of(self, value: torch.Tensor) -> fx.Node:
        return self._nodes[id(value)]

    def _argument(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else self.sizes.node(value)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        """Add a node whose result is ``value``."""
        both = with_tensors(self._argument, (args, kwargs), _KINDS)
        node = self.graph.call_function(target, *both)
        self._note(node, value)
        self.register(value, node)
        if isinstance(value, list | tuple):
            for at, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    one = self.graph.call_function(operator.getitem, (node, at))
                    self._note(one, part)
                    self.register(part, one)
        return value

    def _note(self, node: fx.Node, value: Any) -> None:
        node.meta = {} if self.like is None else dict(self.like.meta)
        node.meta["val"] = value

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_node = isinstance(func, Operator) and func.namespace != "prim" and not _of_types(func)
        if self._pauses or not is_node:
            return self._result(func, args, kwargs)
        if func._schema.is_mutable:
            raise WritesInPlace(str(func))
        if func in ORDERS:
            return self._permuted(func, args)
        if func in _VIEWS:
            return self._viewed(func, *args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._computed(func, args, kwargs)
        key = func, repr(with_tensors(self._argument, (args, kwargs), _KINDS))
        return self._once(key, lambda: self._computed(func, args, kwargs))

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add a node that calls an operator, and return its result."""
        return self.call(func, args, kwargs, self._result(func, args, kwargs))

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns."""
        if self._repeated is None or not is_repeatable(func):
            return func(*args, **kwargs)
        return self._repeated(func, args, kwargs)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
            return self._made[key]
        value = self._made[key]
        if isinstance(value, list | tuple):
            return type(value)(
                v if v is None else self._another_tensor(self.node_of(v)) for v in value
            )
        return self._another_tensor(self.node_of(value))

    def _permuted(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """Drop two permutations that undo each other."""
        node = self.node_of(args[0])
        base, before = self._orders.get(node, (node, tuple(range(args[0].dim()))))
        order = tuple(before[dim] for dim in ORDERS[func](*args))
        if order == tuple(range(len(order))):
            return self._another_tensor(base)
        value = self._once(
            (base, order), lambda: self.call(func, args, {}, self._result(func, args, {}))
        )
        self._orders[self.node_of(value)] = base, order
        return value  # type: ignore[no-any-return]

    def _viewed(self, func: Any, value: torch.Tensor, size: Any) -> torch.Tensor:
        """Replace a view of a view by one view."""
        result: torch.Tensor = self._result(func, (value, size), {})
        node = self.node_of(value)
        while node.target in _VIEWS:
            node = node.all_input_nodes[0]
        if not (node.meta["val"].is_contiguous() and result.is_contiguous()):
            node = self.node_of(value)
        if same_sizes(node.meta["val"].shape, result.shape):
            return self._another_tensor(node)
        size = list(result.shape)
        key = (aten.view.default, node, repr(with_tensors(self._argument, size, SIZES)))
        base = self._another_tensor(node)  # nodes that lanes share may have equal values
        return self._once(key, lambda: self.call(func, (base, size), {}, result))  # type: ignore[no-any-return]

    def _another_tensor(self, node: fx.Node) -> torch.Tensor:
        """Return another tensor for the same node, because a view is not the object that
        it shows.
        """
        value: torch.Tensor = self._result(aten.alias.default, (node.meta["val"],), {})
        self.register(value, node)
        return value


def _of_types(func: Any) -> bool:
    """Return whether an operator returns a type or a number instead of a tensor, as
    ``promote_types`` does.
    """
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(each.type) for each in returns)


def _swapped(x: torch.Tensor, first: int, second: int) -> tuple[int, ...]:
    order = list(range(max(x.dim(), 1)))  # a number accepts dimension 0, too
    order[first], order[second] = order[second], order[first]
    return tuple(order[: x.dim()])


ORDERS: dict[Any, _Order] = {
    aten.t.default: lambda x: tuple(reversed(range(x.dim()))),
    aten.transpose.int: _swapped,
    aten.permute.default: lambda x, dims: tuple(dim % x.dim() for dim in dims),
}
