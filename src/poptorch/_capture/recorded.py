"""Look up tensors in the graphs that are being recorded: their nodes, and their values if known."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from .._base import nested_values, private
from .._base.thread_safety import holding
from .._ir.operators import SAME_NUMBERS, SHAPE_ONLY, Operator, draws, of_shape, writes, written_by
from .._ir.symbolic import has_symbols, same_sizes
from .trace import untraced, without_data

aten = torch.ops.aten
# These keep the numbers in a tensor if they keep how many there are.
_KEEPING = SAME_NUMBERS | {
    aten.expand.default, aten.mean.default, aten.mean.dim, aten.sum.default, aten.sum.dim_IntList,
}  # fmt: skip

# Control flow records the graph of a body while the recording of the outer graph waits.
_outer: ContextVar[tuple[Any, ...]] = ContextVar("poptorch_recorders", default=())

# tensors outside of the graph, by identity, whose values forward or an operator asked for
values_read: ContextVar[dict[int, torch.Tensor] | None] = ContextVar(
    "poptorch_values_read", default=None
)

# returns the value of a tensor on which an operator's shape depends, or None
shape_values: ContextVar[Callable[[torch.Tensor, str], torch.Tensor | None] | None] = ContextVar(
    "poptorch_shape_values", default=None
)


def _recorders() -> tuple[Any, ...]:
    mode = private.get_proxy_mode()
    return _outer.get() if mode is None else (*_outer.get(), mode.tracer)


def suspended_outer_tracing() -> contextlib.AbstractContextManager[None]:
    return holding(_outer, _recorders())


def recorded(tensor: torch.Tensor) -> fx.Node | None:
    slots = (private.get_proxy_slot(tensor, recorder, None) for recorder in _recorders())
    return next((slot.proxy.node for slot in slots if slot is not None), None)


def body_draws(result: Any) -> bool:
    """Return whether the bodies of the loop or branch that computed a result draw at random."""
    tensors, _ = nested_values.flatten(result)
    node = recorded(tensors[0]) if tensors else None
    while node is not None and node.target is operator.getitem:
        (node,) = node.all_input_nodes
    if node is None:
        return False
    root = next(each.root for each in _recorders() if each.graph is node.graph)
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    bodies = [getattr(root, name) for name in names]  # and tensors that they read
    modules = [part for each in bodies if isinstance(each, nn.Module) for part in each.modules()]
    graphs = [part.graph for part in modules if isinstance(part, fx.GraphModule)]
    return any(draws(each) for graph in graphs for each in graph.nodes)


def assign_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor the values and the memory of another one from now on, as an assignment to
    ``.data`` does.

    Values that were computed from it before do not change. Its gradient still is that of the
    target.
    """
    if recorded(value) is None:
        value = value.clone()  # a constant, which becomes part of the program
    torch.Tensor.data.__set__(target, value)  # type: ignore[attr-defined]
    for recorder in _recorders():
        slot = private.get_proxy_slot(value, recorder, None)
        if slot is not None:
            private.set_proxy_slot(target, recorder, slot)


def original(tensor: torch.Tensor) -> fx.Node | None:
    node = recorded(tensor)
    if node is None:
        return None
    while node.target in _KEEPING and same_sizes(_size(node), _size(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


def _size(node: fx.Node) -> list[Any]:
    return [node.meta["val"].numel()]


def is_given(tensor: torch.Tensor) -> bool:
    """Return whether user code itself made a tensor from numbers, or holds it."""
    node = recorded(tensor)
    if node is None:
        return not without_data(tensor)
    return node.op != "placeholder" and all(n.op == "get_attr" for n in node.all_input_nodes)


def forget_failed(operator: Any) -> None:
    """Remove the call of an operator that raised an error from the graph. The tracer records a call
    before it runs, and ``forward`` may catch the error.
    """
    recorders = _recorders()
    if not recorders:
        return
    last = next(reversed(recorders[-1].graph.nodes), None)
    if last is not None and last.target is operator and "val" not in last.meta and not last.users:
        recorders[-1].graph.erase_node(last)


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    node = recorded(tensor)
    if node is None:
        if without_data(tensor):
            return None
        _note_read([tensor])
        return tensor
    known = _known(node, {})
    return known[0] if known else None


def value_for_shape(tensor: torch.Tensor, operator: str) -> torch.Tensor | None:
    """Return the value of a tensor on which the shape of a result depends, if it is known."""
    ask = shape_values.get()
    return constant_value(tensor) if ask is None else ask(tensor, operator)


def _note_read(tensors: Iterable[torch.Tensor]) -> None:
    read = values_read.get()
    if read is not None:
        read.update({id(each): each for each in tensors})


def varies(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Return whether the value of a node changes between runs.

    ``constant``: the nodes that do not change, as far as they are known. Others are added.
    """
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if (node.op == "placeholder" and node not in constant) or draws(node):
            return True
        if node not in constant and node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    constant |= seen
    return False


def value_of_inputs(
    tensor: torch.Tensor, inputs: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, frozenset[int]] | None:
    """Return a tensor's value, if it depends only on constants and given inputs, and the inputs it
    depends on.
    """
    node = recorded(tensor)
    if node is None or len(_recorders()) > 1:  # the body of a loop has its own inputs
        return None
    return _known(node, inputs)


class _Evaluator:
    def __init__(self, root: torch.nn.Module, given: Mapping[int, torch.Tensor]) -> None:
        self._root, self._given = root, given
        self._values: dict[fx.Node, tuple[Any, frozenset[int]]] = {}
        self._ran = self._placeholders = 0

    def value(self, node: fx.Node) -> tuple[torch.Tensor, frozenset[int]] | None:
        nodes = list(node.graph.nodes)
        with untraced(), torch.no_grad():
            for new in nodes[self._ran :]:
                self._run(new)
        self._ran = len(nodes)
        known = self._values.get(node)
        return known if known and isinstance(known[0], torch.Tensor) else None

    def _run(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self._placeholders in self._given:
                inputs = frozenset({self._placeholders})
                self._values[node] = self._given[self._placeholders], inputs
            self._placeholders += 1
        elif node.op == "get_attr":
            value = getattr(self._root, str(node.target))
            if isinstance(value, torch.Tensor) and not without_data(value):
                self._values[node] = value.detach().clone(), frozenset()
        elif node.op == "call_function":
            self._call(node)

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target in SHAPE_ONLY:
            shapes = [node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape]
            if not any(map(has_symbols, shapes)):
                self._values[node] = of_shape(node), frozenset()
            return
        known = [self._values[n] for n in node.all_input_nodes if n in self._values]
        inputs = frozenset[int]().union(*(used for _, used in known))
        runs = isinstance(target, Operator) or target is operator.getitem
        runs = runs and len(known) == len(node.all_input_nodes) and not draws(node)
        if runs and not (inputs and writes(node)):  # values of inputs are the user's own tensors
            args: Any = fx.map_arg(node.args, lambda n: self._values[n][0])
            kwargs: Any = fx.map_arg(node.kwargs, lambda n: self._values[n][0])
            with contextlib.suppress(Exception):  # a run of the program raises and explains it
                self._values[node] = target(*args, **kwargs), inputs
                return
        written = [self._values[n][0] for n in written_by(node) if n in self._values]
        storages = {storage_of(value) for value in written}
        if storages:
            self._values = {
                at: (value, used)
                for at, (value, used) in self._values.items()
                if not isinstance(value, torch.Tensor) or storage_of(value) not in storages
            }


_evaluators = weakref.WeakKeyDictionary[fx.Graph, dict[bool, _Evaluator]]()


def _known(
    node: fx.Node, given: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, frozenset[int]] | None:
    # This module contains what the graph reads from outside.
    root = next(each.root for each in _recorders() if each.graph is node.graph)
    evaluators = _evaluators.setdefault(node.graph, {})
    if bool(given) not in evaluators:
        evaluators[bool(given)] = _Evaluator(root, given)
    known = evaluators[bool(given)].value(node)
    if known is not None:
        _note_read(_constants_of(node, root))
    return known


def _constants_of(node: fx.Node, root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors outside of the graph from which a node is computed."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr":
            yield getattr(root, str(node.target))
        new = [each for each in node.all_input_nodes if each not in seen]
        seen.update(new)
        waiting += new


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
