"""Simplify a graph for printing: drop identities, compute each value once, and write it next to its
use.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from .._ir.bundle import Bundle
from .._ir.graph import GRADIENT, PART, Graph
from .._ir.operators import Operator, draws, reachable, storage_root, writes
from .._ir.slots import Kind, Slot
from ..backends.fused_steps import STEPS, fuse_steps
from ..backends.prepare import prepare
from . import quoting

aten = torch.ops.aten
ENTRY = "entry"  # key in a node's meta: the dict entry that the node is
SCALED = "scaled"  # key in a node's meta: the node is the gradient as the update scales it
MARK = "§"  # precedes a weight's path in keys, until the file is written
_BUNDLE = re.compile(r"~(\d+\.\w+\.\d+)")  # name of a tensor that contains several small weights
_OF_MICRO = {"spread", "micro", "gather"}  # parts of a step that precede its update
LETTERS = {
    Kind.PARAM: "p", Kind.BUFFER: "b", Kind.CONSTANT: "c", Kind.ACCUM: "acc", Kind.OPTSTATE: "m",
    Kind.HYPER: "h", Kind.RNG: "r",
}  # fmt: skip


def key_of(slot: Slot, one_group: bool = False) -> str:
    """Return the key of a slot in the dict of its kind: ``velocity.§fc1.weight``."""
    if slot.kind is Kind.BUFFER:
        return f"{MARK}{quoting.key(slot.path)}"
    own = slot.name if slot.kind is Kind.HYPER and one_group else slot.path
    own = own.removesuffix(slot.weight) if slot.weight else own
    return f"{quoting.key(own)}{MARK}{weight_key(slot.weight)}" if slot.weight else quoting.key(own)


def weight_key(path: str) -> str:
    """Return the key of a weight, or of a tensor that contains several small weights."""
    bundle = _BUNDLE.fullmatch(path)
    return f"small.{bundle[1]}" if bundle is not None else quoting.key(path)


def entry(node: fx.Node) -> str | None:
    """Return the dict entry that a value is, in the state or the gradients."""
    if GRADIENT in node.meta:
        return f'g["{MARK}{node.meta[GRADIENT][0]}"]'
    found: str | None = node.meta.get(ENTRY)
    return found


def of_update(node: fx.Node) -> bool:
    return node.meta.get(PART, "micro") not in _OF_MICRO


def simplified(graph: Graph, bundles: Iterable[Bundle], one_group: bool) -> fx.GraphModule:
    module = fuse_steps(prepare(graph))
    members = {b.slot.key: {m.offset: m.slot for m in b.members} for b in bundles}
    for node, slot in zip(module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True):
        if slot.kind in LETTERS:
            node.meta[ENTRY] = f'{LETTERS[slot.kind]}["{key_of(slot, one_group)}"]'
        for user in list(node.users) if slot.key in members else ():
            if user.meta.get(PART) == "spread":  # this node is one weight, as a view of its bundle
                weight = members[slot.key][user.args[3] if len(user.args) > 3 else 0]
                user.meta[ENTRY] = f'p["{key_of(weight)}"]'
    for node in module.graph.nodes:
        paths = node.meta.pop(GRADIENT, ())
        if paths and of_update(node):
            node.meta[SCALED] = True
        elif paths and node.op == "call_function":
            node.meta[GRADIENT] = tuple(map(weight_key, paths))
    for node in module.graph.find_nodes(op="call_function", target=aten.cat.default):
        if node.meta.get(PART) == "gather":  # joins gradients, which are in a dict
            node.args = ([],)
    _leave_out_identities(module.graph)
    module.graph.eliminate_dead_code(is_impure_node=_acts)
    return module


def _acts(node: fx.Node) -> bool:
    kept = node.op in ("placeholder", "output") or GRADIENT in node.meta
    return kept or writes(node) or node.target in STEPS


def _leave_out_identities(graph: fx.Graph) -> None:
    seen: dict[object, fx.Node] = {}
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        same = _same(node)
        if same is None and not (_acts_once(node) or node.args == ([],)):
            key = (node.target, repr(node.args), repr(node.kwargs), of_update(node))
            same = seen.setdefault(key, node)
        if same is not None and same is not node:
            if GRADIENT in node.meta and same.op == "call_function":
                known = same.meta.get(GRADIENT, ())
                same.meta[GRADIENT] = (*known, *node.meta.pop(GRADIENT))
            node.replace_all_uses_with(same)


def _acts_once(node: fx.Node) -> bool:
    return draws(node) or writes(node) or node.target in STEPS or SCALED in node.meta


def _same(node: fx.Node) -> fx.Node | None:
    """Return the node whose value a node only passes on."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        return first
    if node.target is aten.t.default and first.target is aten.t.default:
        return first.all_input_nodes[0]
    value, own = first.meta.get("val"), node.meta.get("val")
    if not (isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)):
        return None
    by_one = node.target in (aten.mul.Tensor, aten.div.Tensor) and node.args[1] == 1
    layout = [[*value.shape], [*value.stride()]]
    whole = node.target is aten.as_strided.default and [*node.args[1:]] == layout
    return first if whole or (by_one and own.dtype is value.dtype) else None


def ordered(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes in the order of printing: first one micro-batch, then one weight
    after another.
    """
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and ENTRY not in n.meta]
    copies = {n: entry(n.args[0]) or "" for n in nodes if n.target is aten.copy_.default}
    free = {node for node in nodes if of_update(node) and node not in copies}

    def before(node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each in free]

    needed: dict[str, set[fx.Node]] = {}
    for copy, place in copies.items():
        needed.setdefault(place.partition(MARK)[2], set()).update(reachable(before(copy), before))
    count = Counter(node for group in needed.values() for node in group)
    shared = reachable([n for n in free if not count[n]], before) | {
        n for n in free if count[n] > 1
    }
    of_one = [n for group in needed.values() for n in nodes if n in group - shared]
    rest = [n for n in nodes if n not in copies and n not in of_one]
    order = [n for n in [*rest, *of_one] if n.target not in STEPS]
    order += [n for n in rest if n.target in STEPS]
    for copy in copies:  # as soon as the value is computed and nothing reads the old value any more
        root = storage_root(copy.all_input_nodes[0])
        reads = [at for at, n in enumerate(order) if copy.args[1] is n or _reads(n, root)]
        at = max(reads, default=len(order) - 1) + 1
        while at < len(order) and order[at] in copies:
            at += 1
        order.insert(at, copy)
    return order


def _reads(node: fx.Node, root: fx.Node) -> bool:
    if node.target in STEPS:  # its list arguments are computed here
        return any(_reads(n, root) or storage_root(n) is root for n in node.all_input_nodes)
    read = node.all_input_nodes[node.target is aten.copy_.default :]
    return any(storage_root(each) is root for each in read)


def multiple(node: fx.Node) -> bool:
    """Return whether an operator has several results."""
    if isinstance(node.target, Operator) and len(node.target._schema.returns) > 1:
        return True
    return any(user.target is operator.getitem for user in node.users)
