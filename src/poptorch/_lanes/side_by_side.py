"""Turn a graph of one micro-batch into a graph of several side by side, called lanes, without user
code.

A value is either shared by all lanes, or has the lanes as its first dimension. Gradients are sums
over lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._base import log, private
from .._base.errors import Error
from .._ir.graph import Graph, copied, copy_node, graph_module, placeholder, remove_dead_nodes
from .._ir.micro_batches import Lanes
from .._ir.operators import SHAPE_ONLY, acts, draws, generator_of, of_shape, view_of
from .._ir.plan import RESULTS
from .._ir.slots import EVOLVING, Kind, Slot
from .._ir.symbolic import computes_size
from .._ops import random_streams
from .._ops.effects import is_effect
from .._ops.exchanges import exchange
from . import carried_buffers, lane_sums
from .batched import (
    RULES,
    BatchedCall,
    NotVectorisable,
    RowsRule,
    batched,
    named,
    nodes_in,
    sum_dtype,
    with_rank,
)
from .carried_buffers import Chain, reads
from .lane_demand import Demand
from .recorder import GraphRecorder
from .size_nodes import SIZES
from .sized_rules import sized

aten = torch.ops.aten


def side_by_side(graph: Graph, lanes: Lanes) -> Graph:
    """Return the graph of several micro-batches, or raise ``NotVectorisable``."""
    with log.without_failures_of_fake_tensors():
        return _Vectorizer(graph, lanes).made()


def one_by_one(graph: Graph, replicas: int) -> Graph:
    """Return the same graph with separate values in every replica of what forward changes."""
    if replicas == 1:
        return graph
    written = {slot.key for slot in graph.outputs if slot.kind in EVOLVING}
    inputs, outputs = (
        tuple(replace(slot, replicas=replicas) if slot.key in written else slot for slot in ends)
        for ends in (graph.inputs, graph.outputs)
    )
    return replace(graph, inputs=inputs, outputs=outputs)


def sequential_exchange(graph: Graph, replicas: int, why: str) -> Error:
    """Return the error for replicas that exchange tensors and cannot run side by side."""
    parts = [part for part in graph.module.modules() if isinstance(part, fx.GraphModule)]
    found = (node for part in parts for node in part.graph.nodes if node.target is exchange)
    *_, name, where = next(found).args
    return Error(
        f"Custom operator {name} exchanges tensors between replicas that do not run side by side",
        got=f"{replicas} replicas run one after another; {why}",
        where=str(where) or None,
        fix=(
            "change the code or the option that this message names as the reason",
            "if you call options.lanes, pass at least the number of replicas",
            "or use options.replicationFactor(1)",
        ),
    )


class _Vectorizer:
    def __init__(self, graph: Graph, lanes: Lanes) -> None:
        self._source, self._lanes, self._count = graph, lanes, lanes.count
        self._written = {slot.key for slot in graph.outputs}
        self._demand = Demand(graph, lanes)
        self._graph = fx.Graph()
        self._recorder = GraphRecorder(self._graph)
        self._inputs: dict[fx.Node, torch.Tensor] = {}
        self._values: dict[fx.Node, Any] = {}
        self._totals: dict[fx.Node, Any] = {}
        self._copies: dict[fx.Node, Any] = {}  # copies of shared values; numbers for some sizes
        self._open: list[Chain] = []  # chains whose old values are being computed
        self._draws = {node: at for at, node in enumerate(filter(draws, graph.operators))}
        self._parts: dict[str, Any] = dict(graph.module.named_children())  # bodies of loops

    def made(self) -> Graph:
        for node, slot in self._demand.slots.items():
            self._inputs[node] = self._input(node, self._slot(slot))
        mode = next(iter(self._inputs.values())).fake_mode  # type: ignore[attr-defined]
        with torch.no_grad(), mode, self._recorder.recording(mode):
            for node in self._source.module.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                if node in self._demand.with_lanes or node not in self._demand.varying:
                    self._value(node)
                elif node in self._demand.summed:
                    self._total(node)
            results = [self._result(slot, node) for slot, node in self._source.results]
        self._graph.output(tuple(map(self._recorder.node_of, results)))
        remove_dead_nodes(self._graph, acts)
        self._graph.lint()
        ends = self._source.inputs, self._source.outputs
        module = graph_module(self._parts, self._graph)
        return Graph(self._source.name, module, *(tuple(map(self._slot, each)) for each in ends))

    def _slot(self, slot: Slot) -> Slot:
        if slot.kind in RESULTS:
            return _with_lanes(slot, self._count)
        if self._evolves(slot):
            own = self._lanes.replicas
            return replace(slot, shape=(own, *slot.shape), replicas=own, lanes=True)
        if slot.kind is Kind.GRADIENT:
            return replace(slot, dtype=sum_dtype(slot.dtype))
        return slot

    def _evolves(self, slot: Slot) -> bool:
        """Return whether each replica has its own value."""
        written = slot.kind in EVOLVING and slot.key in self._written
        return written and self._lanes.replicas > 1

    def _input(self, node: fx.Node, slot: Slot) -> torch.Tensor:
        value = node.meta["val"]
        lead = slot.shape[: len(slot.shape) - value.dim()]
        with value.fake_mode:
            own = torch.empty((*lead, *value.shape), dtype=value.dtype, device=value.device)
        made = placeholder(self._graph, node.name)
        made.meta = {**node.meta, "val": own}
        self._recorder.register(own, made)
        self._recorder.sizes.read(own, made)
        return own

    def _value(self, node: fx.Node) -> Any:
        """Return a value with lanes in front, or the value that lanes share."""
        if node not in self._values:
            before, self._recorder.like = self._recorder.like, node
            try:
                value = self._made(node)
            except NotVectorisable as error:
                raise error if error.named else named(node, str(error)) from error
            finally:
                self._recorder.like = before
            self._values[node] = value
            if node not in self._demand.varying and isinstance(value, torch.Tensor):
                self._copies[node] = self._recorder.node_of(value)
        return self._values[node]

    def _made(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._seen(node)
        if computes_size(node):
            return self._size(node)
        if node.target is aten.copy.default:
            value, like = self._value(node.args[1]), node.meta["val"]  # type: ignore[arg-type]
            lead = (self._count,) if node in self._demand.varying else ()
            ranked = with_rank(value, like.dim(), lead).to(like.dtype)
            return ranked.expand((*lead, *like.shape))
        if node not in self._demand.varying:
            return self._shared(node)
        if is_effect(node):
            raise NotVectorisable("it runs one micro-batch at a time, in order")
        statistic = carried_buffers.running_statistic(node)
        if statistic is not None:
            share: Any = statistic[0].args[6]
            batch = self._value(statistic[0])[node.args[1]]
            return self._value(statistic[1]) * (1 - share) + batch * share
        if node.target is private.optional("while_loop_op"):
            return self._loop(node)
        call = self._call(node)
        if draws(node) and node.target not in RULES:
            return drawn(call, self._draws[node])
        folded = (
            None if node in self._demand.unfolded else lane_sums.folded(node, self._demand.varies)
        )
        if folded is not None:
            return self._folded(call, folded)
        found = sized(call)
        return batched(call) if found is NotImplemented else found

    def _folded(self, call: BatchedCall, entry: RowsRule) -> Any:
        """Return the results of an operator, some of which are sums over lanes."""
        both = lane_sums.divided(call, entry)
        if both is None:
            return entry(call)
        rows, sums = both
        made = entry(rows) if any(rows.args[-1]) else [None] * len(rows.args[-1])
        added = entry(sums) if any(sums.args[-1]) else made
        return [each if at in entry.whole else made[at] for at, each in enumerate(added)]

    def _call(self, node: fx.Node) -> BatchedCall:
        return BatchedCall(
            node, {n: self._value(n) for n in reads(node)}, self._demand.varies, self._count
        )

    def _loop(self, node: fx.Node) -> Any:
        """Return the results of a loop over values in lanes. Its body gets lanes, too."""
        test, body, changed, others = (list(nodes_in(arg)) for arg in node.args)
        inputs, count = [*changed, *others], len(changed)
        own = [each in self._demand.varying for each in inputs]
        while True:  # until no more values turn out to differ
            step = self._part(body[0], own, own[:count])
            varying = Demand(step, self._lanes).varying
            after = [old or new in varying for old, new in zip(own, step.returned, strict=False)]
            if after == own[:count]:
                break
            own[:count] = after
        condition = self._part(test[0], own, [False])
        if not Demand(condition, self._lanes).varying.isdisjoint(condition.returned):
            raise NotVectorisable("its lanes would end at different times")
        values = [
            self._in_lanes(each) if varies else self._value(each)
            for each, varies in zip(inputs, own, strict=True)
        ]
        values[:count] = [value.clone() for value in values[:count]]
        parts = [self._added(at, part) for at, part in ((test[0], condition), (body[0], step))]
        args = (*parts, tuple(values[:count]), tuple(values[count:]))
        results = tuple(map(torch.empty_like, values[:count]))
        found = self._recorder.call(node.target, args, {}, results)
        return [
            value if varies else value.expand(self._count, *value.shape)
            for value, varies in zip(found, own, strict=False)
        ]

    def _part(self, attribute: fx.Node, own: list[bool], results: list[bool]) -> Graph:
        """Return a loop's test or body with lanes, in which batches and outputs are marked."""
        module = copied(self._parts[str(attribute.target)])
        for node in module.graph.nodes:
            node.target = view_of(node.target)
        output: Any = module.graph.output_node()
        if isinstance(output.args[0], fx.Node):
            output.args = ((output.args[0],),)
        given = zip(module.graph.find_nodes(op="placeholder"), own, strict=True)
        made = zip(output.args[0], results, strict=True)
        return Graph("part", module, _ends(given, Kind.BATCH), _ends(made, Kind.OUTPUT))

    def _added(self, attribute: fx.Node, part: Graph) -> fx.Node:
        """Add a loop's part with lanes to the graph, and a node that reads it."""
        name = f"{attribute.target}_in_lanes"
        before = self._parts[str(attribute.target)].graph.output_node().args[0]
        with self._recorder.paused():
            module = self._parts[name] = side_by_side(part, self._lanes).module
        if isinstance(before, fx.Node):
            output: Any = module.graph.output_node()
            output.args = (output.args[0][0],)
            module.recompile()
        return self._graph.create_node("get_attr", name)

    def _in_lanes(self, node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = self._value(node)
        if node in self._demand.varying:
            return value
        return value.expand(self._count, *value.shape).clone()

    def _shared(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if node.target in SHAPE_ONLY and any(map(self._demand.varies, node.all_input_nodes)):
            for size in filter(computes_size, node.all_input_nodes):
                self._value(size)
            return of_shape(node)
        for each in node.all_input_nodes:
            self._value(each)
        copy = self._copies[node] = copy_node(self._graph, node, self._copies)
        return self._recorder.copied(value, copy)

    def _size(self, node: fx.Node) -> Any:
        """Return a size, which all lanes have in common."""
        size = node.meta["val"]
        if not isinstance(size, SIZES):
            self._copies[node] = size
        elif all(map(computes_size, node.all_input_nodes)):
            for each in node.all_input_nodes:
                self._value(each)
            self._copies[node] = copy_node(self._graph, node, self._copies)
            self._recorder.sizes.register(size, self._copies[node])
        else:
            self._copies[node] = self._recorder.sizes.node(size)
        return size

    def _seen(self, node: fx.Node) -> Any:
        """Return what lanes see of an input."""
        own, slot = self._inputs[node], self._demand.slots[node]
        chain = self._demand.chains.get(node)
        if chain is not None:
            form = self._form(chain)
            seen = carried_buffers.before_each(self._old(node), form, self._sequence(slot))
            return seen.to(slot.dtype)
        if node in self._demand.varying and slot.kind is not Kind.BATCH:  # the replica's number
            return own + (torch.arange(self._count) % self._lanes.replicas).to(own.dtype)
        return own

    def _form(self, chain: Chain) -> carried_buffers.Affine:
        if chain in self._open:
            raise NotVectorisable(f"{chain.name} depends on its previous value")
        self._open.append(chain)
        try:
            return chain.form(chain.new, self._operand)
        finally:
            self._open.pop()

    def _operand(self, node: fx.Node, rank: int, at: Any) -> torch.Tensor:
        value = self._value(node) if at is None else self._value(node)[at]
        value = value if node in self._demand.varying else value[None]
        return with_rank(carried_buffers.widened(value), rank, value.shape[:1])

    def _old(self, node: fx.Node) -> torch.Tensor:
        own = carried_buffers.widened(self._inputs[node])
        return own if self._evolves(self._demand.slots[node]) else own[None]

    def _sequence(self, slot: Slot) -> Lanes:
        """Return the order in which micro-batches change a value, and for how many replicas
        separately.
        """
        return self._lanes if self._evolves(slot) else Lanes(self._count)

    def _total(self, node: fx.Node) -> Any:
        """Return the sum over lanes."""
        if node not in self._totals:
            before, self._recorder.like = self._recorder.like, node
            self._totals[node] = self._added_up(node)
            self._recorder.like = before
        return self._totals[node]

    def _added_up(self, node: fx.Node) -> Any:
        dtype = sum_dtype(node.meta["val"].dtype)
        if node not in self._demand.varying:
            return self._value(node).to(dtype) * self._count
        if node in self._demand.with_lanes or not self._demand.is_computed_inside(node):
            return self._value(node).sum(0, dtype=dtype)
        if lane_sums.sum_of(node, self._demand.varies):
            source, at = node.all_input_nodes[0], node.args[1]
            value = self._value(source)[at]
            return value.sum(0, dtype=dtype) if source in self._demand.unfolded else value
        contraction = lane_sums.contraction(node, self._demand.varies)
        if contraction is not None:
            call = self._call(node)
        else:
            linear = lane_sums.linear_in(node, self._demand.varies)
            summed = reads(node) if lane_sums.in_all(node) else linear
            values = {n: self._total(n) if n in summed else self._value(n) for n in reads(node)}
            call = BatchedCall(node, values, self._demand.varies, self._count)
        call = call if dtype is node.meta["val"].dtype else call.widened()
        return contraction(call) if contraction is not None else call.run()

    def _result(self, slot: Slot, node: fx.Node) -> torch.Tensor:
        if slot.kind is Kind.GRADIENT:
            return self._total(node).to(sum_dtype(slot.dtype))  # type: ignore[no-any-return]
        if slot.kind is Kind.VALUE:
            return self._value(node)  # type: ignore[no-any-return]
        if slot.kind in RESULTS:
            return self._in_lanes(node)
        (old,) = (each for each, own in self._demand.slots.items() if own.key == slot.key)
        self._recorder.like = node
        form = self._form(self._demand.chains[old])
        after = carried_buffers.after_all(self._old(old), form, self._sequence(slot)).to(slot.dtype)
        return after if self._evolves(slot) else after[0]


def _with_lanes(slot: Slot, count: int) -> Slot:
    symbols = ("", *slot.symbols) if slot.symbols else ()
    return replace(slot, shape=(count, *slot.shape), symbols=symbols, lanes=True)


def _ends(nodes: Iterable[tuple[fx.Node, bool]], in_lanes: Kind) -> tuple[Slot, ...]:
    values = ((node.meta["val"], in_lanes if own else Kind.VALUE) for node, own in nodes)
    return tuple(
        Slot(kind, tuple(value.shape), value.dtype, index=at)
        for at, (value, kind) in enumerate(values)
    )


def drawn(call: BatchedCall, number: int) -> torch.Tensor:
    """Let each lane draw what it would draw alone."""
    if generator_of(call.node.target, call.node.args, call.node.kwargs) is not None:
        raise NotVectorisable(
            "it draws from a generator of the model, whose state changes "
            "from micro-batch to micro-batch"
        )
    kind = random_streams.lane_by_lane(call.node.target, call.node.args)
    if kind is None:
        raise NotVectorisable("its random numbers cannot be drawn separately for each micro-batch")
    value = call.node.meta["val"]
    if kind[0] == random_streams.SHARES:
        like = call.lanes(0).contiguous()  # because drawn tensors always are contiguous
    else:
        strides = [value.numel(), *value.stride()]
        like = torch.empty_strided([call.count, *value.shape], strides, dtype=value.dtype)
    return random_streams.draw(like, *kind, call.count, number)  # type: ignore[no-any-return]
