"""Cut graphs into a graph for each pass: forward and backward of stages, and the update rounds of
chips. Decides which values a backward pass computes again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from .._cost.live_bytes import value_bytes
from .._ir import slots
from .._ir.block_labels import Direction, StagePass, is_kept, pass_of, stage_passes
from .._ir.graph import Graph, copy_node, graph_module, placeholder
from .._ir.operators import acts, draws, is_mask, may_view
from .._ir.plan import Layout
from .._ir.slots import Kind, Slot
from .place import find_homes
from .stages import with_passes

Homes = Mapping[str, tuple[int, ...]]


class Cutter:
    """Cuts a graph into passes that run one after another in their order.

    A value that a pass reads from another pass becomes a ``value.*`` between them. The same applies
    to the old value of a state tensor that an earlier pass has already changed. Outputs in
    ``copies`` are returned by several passes. Each of these is the last pass that reads its copy of
    the state.
    Outputs that no pass computes are returned by the pass that ``fallback`` names.
    """

    def __init__(
        self,
        graph: Graph,
        passes: Mapping[fx.Node, StagePass],
        inline: Callable[[fx.Node, StagePass], bool],
        copies: Mapping[str, Sequence[StagePass]],
        fallback: Callable[[Slot, fx.Node], StagePass],
    ) -> None:
        self._graph = graph
        self._passes = passes
        self._inline = inline
        self._order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
        self._inputs = graph.arguments
        self._results: dict[StagePass, list[tuple[Slot, fx.Node]]] = {}
        self._writer: dict[str, StagePass] = {}
        changed = graph.updates
        for slot, node in graph.results:
            own = passes[node] if node in passes else fallback(slot, node)
            for writer in copies.get(slot.key, (own,)):
                self._results.setdefault(writer, []).append((slot, node))
            if slot.key in changed and slot.key not in copies:
                self._writer[slot.key] = own

    def cut(self, passes: Collection[StagePass]) -> dict[StagePass, Graph]:
        own: dict[StagePass, list[fx.Node]] = {stage_pass: [] for stage_pass in sorted(passes)}
        for node, stage_pass in self._passes.items():
            own[stage_pass].append(node)
        reads = {each: self._closure(nodes, each) for each, nodes in own.items()}
        handed_on: dict[StagePass, dict[fx.Node, Slot]] = {each: {} for each in own}
        for _, values in reads.values():
            for node in values:
                maker = self._passes.get(node) or self._writer[self._inputs[node].key]
                handed_on[maker][node] = self._value(node)
        return {each: self._extract(each, own[each], *reads[each], handed_on[each]) for each in own}

    def _closure(
        self, own: Collection[fx.Node], stage_pass: StagePass
    ) -> tuple[set[fx.Node], dict[fx.Node, None]]:
        mine, recomputed, values = set(own), set[fx.Node](), dict[fx.Node, None]()
        stack = [i for node in own for i in node.all_input_nodes]
        stack += [node for _, node in self._results.get(stage_pass, ())]
        while stack:
            node = stack.pop()
            if node in mine or node in recomputed or node in values:
                continue
            if node in self._inputs:
                if stage_pass > self._writer.get(self._inputs[node].key, stage_pass):
                    values[node] = None  # it has been overwritten by then
            elif node.op == "get_attr" or self._inline(node, stage_pass):
                recomputed.add(node)
                stack += node.all_input_nodes
            else:
                values[node] = None
        return recomputed, dict.fromkeys(sorted(values, key=self._order.__getitem__))

    def _extract(
        self,
        stage_pass: StagePass,
        own: Collection[fx.Node],
        recomputed: Collection[fx.Node],
        values: Collection[fx.Node],
        handed_on: Mapping[fx.Node, Slot],
    ) -> Graph:
        nodes = sorted({*own, *recomputed}, key=self._order.__getitem__)
        results = self._results.get(stage_pass, []) + [(s, node) for node, s in handed_on.items()]
        used = {i for node in nodes for i in node.all_input_nodes} | {node for _, node in results}
        written = {slot.key for slot, _ in results}  # an update is an input, too: rule G6
        used |= {node for node, slot in self._inputs.items() if slot.key in written}
        reads = [(n, s) for n, s in self._inputs.items() if n in used and n not in values]
        reads += [(node, self._value(node)) for node in values]
        made = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node, slot in reads:
            mapping[node] = placeholder(made, slot.key)
            mapping[node].meta = {"val": node.meta.get("val")}
        for node in nodes:
            mapping[node] = copy_node(made, node, mapping)
        made.output(tuple(mapping[node] for _, node in results))
        module = graph_module(self._graph.module, made)
        return Graph(
            str(stage_pass), module, tuple(s for _, s in reads), tuple(s for s, _ in results)
        )

    def _value(self, node: fx.Node) -> Slot:
        name = self._graph.name
        if node in self._inputs:
            slot = self._inputs[node]
            return slots.value(f"{name}.old.{slot.key}", slot.shape, slot.dtype)
        result = node.meta["val"]
        assert isinstance(result, torch.Tensor), f"{node} passes no tensor on"
        return slots.value(f"{name}.{node.name}", tuple(result.shape), result.dtype)


def split(
    graph: Graph, layout: Layout, training: bool, recompute: bool
) -> tuple[dict[StagePass, Graph], Homes]:
    """Cut a micro graph into the passes that its labels name. Return these and the chips of the
    state.

    With ``recompute``, backward passes compute activations again, except for those drawn at random
    and those that the user wants stored. The last stage stores everything after the last of these.
    """
    graph = with_passes(graph, {}, len(layout.stages))
    homes = find_homes(graph, layout.stages)
    placed = {n: where for n in graph.module.graph.nodes if (where := pass_of(n)) is not None}
    free = _free(graph, placed)
    recomputed = _recomputable(placed, len(layout.stages)) if recompute else {}

    def inline(node: fx.Node, stage_pass: StagePass) -> bool:
        chip = layout.stages[stage_pass.stage].chip
        if node in free and all(chip in homes[key] for key in free[node]):
            return True
        return _shows_whole(node) or (
            stage_pass.backward and recomputed.get(node) == stage_pass.stage
        )

    passes = stage_passes(len(layout.stages), training)

    def fallback(_: Slot, node: fx.Node) -> StagePass:
        source = graph.arguments[node]
        if source.kind is Kind.BATCH:
            return passes[0]
        return next(p for p in passes if layout.stages[p.stage].chip in homes[source.key])

    return Cutter(graph, placed, inline, {}, fallback).cut(passes), homes


def _shows_whole(node: fx.Node) -> bool:
    """Return whether a node is a view of all of its operand, so that one transfer is
    enough for both.
    """
    source = node.args[0] if node.args and may_view(node) else None
    if not isinstance(source, fx.Node) or node.target is operator.getitem:
        return False
    shown, whole = node.meta.get("val"), source.meta.get("val")
    if not isinstance(shown, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return shown.numel() >= whole.numel()


def _free(graph: Graph, placed: Collection[fx.Node]) -> dict[fx.Node, frozenset[str]]:
    """Return views of unchanged inputs and values without operands, with the state that the views
    belong to.
    """
    changed = graph.updates
    free: dict[fx.Node, frozenset[str]] = {
        node: frozenset({slot.key} if slot.is_state else ())
        for node, slot in graph.arguments.items()
        if slot.key not in changed
    }
    for node in placed:
        inputs = node.all_input_nodes
        viewing = bool(inputs) and may_view(node) and all(i in free for i in inputs)
        if viewing or (not inputs and not draws(node) and not acts(node)):
            free[node] = frozenset[str]().union(*(free[i] for i in inputs))
    return free


def _recomputable(placed: Mapping[fx.Node, StagePass], stages: int) -> dict[fx.Node, int]:
    """Return the forward nodes that backward passes may compute again, with their stage.

    Source for the last stage: PopART (MIT), willow/src/transforms/pipeline.cpp.
    """
    last = stages - 1
    before = _before_checkpoints([n for n, where in placed.items() if where == StagePass(last)])
    recomputed = {}
    for node, stage_pass in placed.items():
        kept = is_mask(node) or is_kept(node) or acts(node)
        at_once = stage_pass.stage == last and node not in before
        if not (stage_pass.backward or at_once or kept):
            recomputed[node] = stage_pass.stage
    return recomputed


def _before_checkpoints(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes, in the order of execution, before the last one that the user wants
    stored.
    """
    own, before = set(nodes), set[fx.Node]()
    for node in reversed(nodes):
        if is_kept(node) or node in before:
            before.update(source for source in node.all_input_nodes if source in own)
    return before


def update_homes(graph: Graph, weights: Homes) -> dict[str, tuple[int, ...]]:
    slots = {slot.key: slot for slot in (*graph.inputs, *graph.outputs)}
    homes = {s.weight: weights[s.key][:1] for s in slots.values() if s.kind is Kind.PARAM}
    chips = tuple(sorted({chip for home in homes.values() for chip in home}))
    return {key: homes.get(slot.weight, chips) for key, slot in slots.items()}


def split_update(graph: Graph, homes: Homes) -> dict[StagePass, Graph]:
    placed, replicated = _placed(graph, homes)
    # Updated state that no operator computes: one round on each of its chips.
    rest = (s for s, node in graph.results if node not in placed and s.is_state)
    untouched = {chip for slot in rest for chip in homes[slot.key][:1]}
    busy = {each.stage for each in placed.values()}
    passes = {*placed.values(), *(StagePass(chip, Direction.UPDATE) for chip in untouched - busy)}
    last = {each.stage: each for each in sorted(passes)}
    copies = {
        slot.key: [last[chip] for chip in homes[slot.key] if chip in last]
        for slot, node in graph.results
        if node in replicated
    }
    cutter = Cutter(
        graph,
        placed,
        lambda node, _: node in replicated,
        copies,
        lambda slot, _: last[homes[slot.key][0]],
    )
    return cutter.cut(passes)


def _placed(graph: Graph, homes: Homes) -> tuple[dict[fx.Node, StagePass], set[fx.Node]]:
    placed: dict[fx.Node, StagePass] = {}
    replicated: set[fx.Node] = set()
    where = {  # what is on one chip
        node: StagePass(homes[slot.key][0], Direction.UPDATE)
        for node, slot in graph.arguments.items()
        if len(homes[slot.key]) == 1 and slot.kind is not Kind.HYPER
    }
    for node in graph.operators:
        inputs = {i: where[i] for i in node.all_input_nodes if i in where}
        if not inputs:
            replicated.add(node)
            continue
        # On the chip of its largest operand, so that small results are sent, and not weights.
        chip = min((-value_bytes(i), own.stage) for i, own in inputs.items())[1]
        rounds = max(own.round + (own.stage != chip) for own in inputs.values())
        placed[node] = where[node] = StagePass(chip, Direction.UPDATE, rounds)
    return placed, replicated
