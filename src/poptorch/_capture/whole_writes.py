"""Replace operators that write over a whole tensor with pure ones, without replaying the graph.

Batch norms write their statistics, some activations write over their inputs, and optimizers write
over weights and state. Nodes that read the tensor later then read the new value, and views of it
are made again. A write through a view of all elements, such as a transposed one, gives the tensor
a new value as well. Replaying the graph to remove writes takes as long as recording it did. That
is still necessary if a part of a tensor is written.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._ir.graph import set_arguments
from .._ir.known_results import RepeatedCalls
from .._ir.operators import Operator, may_view, writes, written_by

aten = torch.ops.aten

IDENTITIES = {
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}  # fmt: skip
_BATCH_NORM = aten._native_batch_norm_legit.default
# Operators that write and are not element-wise, or whose pure form has another name.
_PURE: dict[Any, Any] = {
    aten.copy_.default: aten.copy.default,
    aten.fill_.Scalar: aten.fill.Scalar,
    aten.zero_.default: aten.zero.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    _BATCH_NORM: aten._native_batch_norm_legit_functional.default,
}
_TURNED = {aten.permute.default, aten.t.default, aten.transpose.int}
_RESHAPED = {
    aten.view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
}  # fmt: skip
# Views that mean the same for another tensor with the same layout.
_REPEATABLE_VIEWS = {
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.diagonal.default,
    *_TURNED, *_RESHAPED, *IDENTITIES,
}  # fmt: skip


class _Place(NamedTuple):
    """Where a node's value is stored."""

    root: fx.Node  # the node that made the memory
    views: tuple[fx.Node, ...]  # the views that lead from there to the value; empty for all of it


_Places = Mapping[fx.Node, _Place]


def make_whole_writes_pure(graph: fx.Graph, mode: Any) -> None:
    """Replace all writes, or none if there are others, because then the graph is replayed."""
    writers = [node for node in graph.nodes if writes(node)]
    if not writers or any(_pure_form(node.target) is None for node in writers):
        return
    places = _places(graph)
    written = {node: [places.get(each) for each in written_by(node)] for node in writers}
    last: dict[fx.Node, fx.Node] = {}
    for node, targets in written.items():
        for place in targets:
            if place is None:
                return
            last[place.root] = node
    for node, place in places.items():
        outdated = place.root in last and node < last[place.root]
        if outdated and any(view.target not in _REPEATABLE_VIEWS for view in place.views):
            return
    results: dict[fx.Node, Sequence[Any]] = {}
    calls = RepeatedCalls(mode)
    with mode, torch.no_grad():
        for node in writers:
            made = _results(node, places, mode, calls)
            if made is None:
                return
            results[node] = made
    _WriteRewriting(graph, places, results).run()


def _pure_form(target: Any) -> Any:
    """Return the operator that returns what another one writes, or None."""
    return _PURE[target] if target in _PURE else _pure_by_name(target)


@functools.cache
def _pure_by_name(target: Any) -> Any:
    """Return the element-wise operator with the name of one that writes, without ``_``, or None."""
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    found: Any = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    same = isinstance(found, Operator) and _arguments(found) == _arguments(target)
    return found if same and not found._schema.is_mutable else None


def _arguments(target: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in target._schema.arguments]


def _places(graph: fx.Graph) -> dict[fx.Node, _Place]:
    places: dict[fx.Node, _Place] = {}
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(first, fx.Node) and not may_view(first):
            same = next(each for each in first.users if each.args == node.args)
            places[node] = _Place(same, ())
        elif node.op != "call_function" or not may_view(node):
            places[node] = _Place(node, ())
        elif isinstance(first, fx.Node):
            root, views = places[first]
            if node.target not in IDENTITIES and not writes(node):
                views = () if _is_whole(node, root) else (*views, node)
            places[node] = _Place(root, views)
    return places


def _is_whole(view: fx.Node, root: fx.Node) -> bool:
    value, whole = view.meta.get("val"), root.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return view.target in _REPEATABLE_VIEWS and _have_same_layout(value, whole)


def _results(node: fx.Node, places: _Places, mode: Any, call: RepeatedCalls) -> list[Any] | None:
    """Return fake tensors for the result of the pure operator, and for the new value of each tensor
    from which the written view was made, up to the one that has all of the memory. Return None if
    these would differ from the results of the write.
    """
    inputs = [each.meta.get("val") for each in node.all_input_nodes]
    if any(getattr(each, "fake_mode", None) is not mode for each in inputs):
        return None
    args = fx.map_arg(node.args, lambda each: each.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda each: each.meta["val"])
    written = written_by(node)
    result = call(_pure_form(node.target), args, kwargs)
    if node.target is _BATCH_NORM:
        before = [*node.meta["val"], *(each.meta["val"] for each in written)]
        alike = all(map(_have_same_layout, result, before))
        return [result] if alike and not any(places[each].views for each in written) else None
    if not _have_same_layout(result, node.meta["val"]):
        return None
    results = [result]
    for view in reversed(places[written[0]].views):
        back = _back(view)
        if back is None:
            return None
        operation, *others = back
        results.append(operation(results[-1], *others))
        if not _have_same_layout(results[-1], _viewed(view).meta["val"]):
            return None
    return results


def _viewed(view: fx.Node) -> fx.Node:
    viewed = view.args[0]
    assert isinstance(viewed, fx.Node)
    return viewed


def _back(view: fx.Node) -> tuple[Any, ...] | None:
    """Return the operator, and what follows its first argument, that undoes a view; None if the
    view has not all elements.
    """
    shape = _viewed(view).meta["val"].shape
    if view.target in _RESHAPED and all(type(size) is int for size in shape):
        return aten.view.default, list(shape)
    if view.target not in _TURNED:
        return None
    turned = torch.empty([1 + at for at in range(len(shape))], device="meta")
    order = [size - 1 for size in view.target(turned, *view.args[1:]).shape]
    return aten.permute.default, [order.index(at) for at in range(len(order))]


def _have_same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    kinds = [(each.shape, each.stride(), each.dtype, each.storage_offset()) for each in (one, two)]
    return kinds[0] == kinds[1]


class _WriteRewriting:
    """Lets every node read the value that the memory of its operands has at this point.

    Args:
        results: what ``_results`` returns, by what writes.
    """

    def __init__(
        self, graph: fx.Graph, places: _Places, results: Mapping[fx.Node, Sequence[Any]]
    ) -> None:
        self._graph, self._places, self._results = graph, places, results
        self._now: dict[fx.Node, fx.Node] = {}  # the present value, by memory
        # the latest node of each view, and the value of all of the memory that it belongs to
        self._latest: dict[_Place, tuple[fx.Node, fx.Node]] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            targets = written_by(node) if node in self._results else []
            written = [self._places[each] for each in targets]
            if self._reads_others(node):
                with self._graph.inserting_before(node):
                    args = fx.map_arg(node.args, self._held)
                    set_arguments(node, args, fx.map_arg(node.kwargs, self._held))
            place = self._places.get(node)
            if node in self._results:
                self._write(node, written)
            elif place is not None and place.views and place.views[-1] is node:
                self._latest[place] = node, self._value(place.root)

    def _reads_others(self, node: fx.Node) -> bool:
        """Return whether other nodes have the present values of its inputs, or are used for them
        because they are equal.
        """
        for each in node.all_input_nodes:
            place = self._places.get(each)
            if place is not None:
                first = (place.root, *place.views)[-1]
                if first is not each or place.root in self._now:
                    return True
        return False

    def _value(self, root: fx.Node) -> fx.Node:
        return self._now.get(root, root)

    def _held(self, node: fx.Node) -> fx.Node:
        place = self._places.get(node)
        return node if place is None else self._at(place)

    def _at(self, place: _Place) -> fx.Node:
        value = self._value(place.root)
        if not place.views:
            return value
        latest, of = self._latest[place]
        if of is not value:
            view = place.views[-1]
            viewed = self._at(_Place(place.root, place.views[:-1]))
            latest = self._graph.call_function(
                view.target,  # type: ignore[arg-type]
                (viewed, *view.args[1:]),
                view.kwargs,
            )
            latest.meta = dict(view.meta)
            self._latest[place] = latest, value
        return latest

    def _write(self, node: fx.Node, targets: Sequence[_Place]) -> None:
        first, *others = self._results[node]
        node.target = _pure_form(node.target)
        if len(targets) > 1:
            for place, new in zip(targets, _statistics(node, first), strict=True):
                self._now[place.root] = new
            return
        made = [node]
        (place,) = targets
        with self._graph.inserting_after(node):
            for view, value in zip(reversed(place.views), others, strict=True):
                operation, *rest = _back(view) or ()
                new = self._graph.call_function(operation, (made[-1], *rest))
                new.meta = {**node.meta, "val": value}
                made[-1].append(new)
                made.append(new)
        self._now[place.root] = made[-1]
        for depth, each in enumerate(made[:-1]):
            views = place.views[: len(place.views) - depth]
            self._latest[_Place(place.root, views)] = each, made[-1]


def _statistics(norm: fx.Node, result: Sequence[torch.Tensor]) -> list[fx.Node]:
    """Return nodes for the statistics that a pure batch norm returns."""
    made, last = [], norm
    while last.next.target is operator.getitem and last.next.args[0] is norm:
        last = last.next
    with norm.graph.inserting_after(last):
        for at in (4, 3):  # the later one is inserted first
            made.append(norm.graph.call_function(operator.getitem, (norm, at)))
            made[-1].meta = {**norm.meta, "val": result[at]}
    norm.meta = {**norm.meta, "val": tuple(result)}
    return made[::-1]
