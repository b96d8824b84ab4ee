"""Read the hints that operators left in a recorded graph, and remove them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._base import log
from .._base.errors import Error
from .._ir.block_labels import KEEP, MEMORY, PARTIALS, marks, note_on
from .._ir.operators import storage_root
from .._ir.slots import RETURNED, Kind, Slot
from .._ops.context import GROUP, Group
from .._ops.identities import Hint, hint

aten = torch.ops.aten

_CONVOLUTION = aten.convolution.default
_PRICED = {"availableMemoryProportions": MEMORY, "partialsTypes": PARTIALS}
_HEEDS_MEMORY = {
    _CONVOLUTION, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
    aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default,
}  # fmt: skip
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten._to_copy.default}


def lower(
    graph: fx.Graph, inputs: Sequence[Slot], outputs: Sequence[Slot], groups: Mapping[int, Group]
) -> dict[str, str]:
    marked = [node for node in graph.nodes if node.target is hint]
    overlaps: dict[str, str] = {}
    for node in marked:
        kind = Hint(node.args[1])
        if kind is Hint.OVERLAP_INPUT:
            overlaps[_input_key(graph, inputs, node)] = str(node.args[2])
        elif kind is Hint.OVERLAP_OUTPUT:
            overlaps[_output_key(graph, outputs, node)] = str(node.args[2])
        elif kind is Hint.AVAILABLE_MEMORY:
            _limit_memory(node)
        else:
            source = _unmarked(node)
            # Notes on one of several results of an operator would get lost.
            several = source.target is operator.getitem
            note_on(source.all_input_nodes[0] if several else source, **{KEEP: True})
    for node in marked:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    _lower_groups(graph, groups)
    return overlaps


def _unmarked(node: fx.Node) -> fx.Node:
    while node.target is hint:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _limit_memory(mark: fx.Node) -> None:
    node = storage_root(_unmarked(mark))
    if node.target in _HEEDS_MEMORY:
        note_on(node, **{MEMORY: float(mark.args[2])})  # type: ignore[arg-type]
        return
    _warn_without_memory(str(mark.args[3]))


@functools.cache
def _warn_without_memory(line: str) -> None:
    log.python.warning(
        (
            "poptorch.set_available_memory has no effect at %s, because the tensor is not the "
            "result of a convolution, a matrix product or a lookup"
        ),
        line or "an unknown line",
    )


def _input_key(graph: fx.Graph, inputs: Sequence[Slot], mark: fx.Node) -> str:
    (tensor,) = mark.all_input_nodes
    pairs = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    batch = {node: slot.key for node, slot in pairs if slot.kind is Kind.BATCH}
    if tensor not in batch:
        raise _misplaced(
            mark,
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input "
            "to the model",
            "mark an argument of forward, once, before anything else uses it",
        )
    if any(user is not mark and user.op != "output" for user in tensor.users):
        raise _misplaced(
            mark,
            "poptorch.set_overlap_for_input must be the only op applied to an input",
            "use the returned tensor everywhere",
        )
    return batch[tensor]


def _output_key(graph: fx.Graph, outputs: Sequence[Slot], mark: fx.Node) -> str:
    results: Any = graph.output_node().args[0]
    returned = [
        (node, slot.key)
        for node, slot in zip(results, outputs, strict=False)
        if slot.kind in RETURNED
    ]
    same, whole = set(_same_value(mark)), set(_same_value(_unmarked(mark)))
    keys = [key for node, key in returned if node in same]
    if not keys:
        raise _misplaced(
            mark,
            "poptorch.set_overlap_for_output applied on a node which is not a tensor output "
            "to the model",
            "return the tensor that set_overlap_for_output returns",
        )
    if sum(node in whole for node, _ in returned) > 1:
        raise _misplaced(
            mark,
            "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice",
            "return the tensor once",
        )
    return keys[0]


def _same_value(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if user.target in _SAME_VALUE or user.target is hint:
            yield from _same_value(user)


def _misplaced(mark: fx.Node, title: str, fix: str) -> Error:
    return Error(title, where=str(mark.args[3]) or None, fix=fix)


def _lower_groups(graph: fx.Graph, groups: Mapping[int, Group]) -> None:
    for number, group in groups.items():
        members = [
            node
            for node in graph.nodes
            if node.target is _CONVOLUTION and marks(node).get(GROUP) == number
        ]
        if not members:
            raise Error(
                "Unexpected end_multi_conv",
                got="a poptorch.MultiConv block without a convolution",
                where=group.where,
                fix="call the convolutions inside the block 'with poptorch.MultiConv():'",
            )
        _share_options(members, group)


def _share_options(members: Sequence[fx.Node], group: Group) -> None:
    count = len(members)
    for name, values in group.options.items():
        if len(values) not in (1, count):
            raise Error(
                (
                    f"poptorch.MultiConv: the number of values for {name} differs from the number "
                    "of convolutions"
                ),
                got=f"{len(values)} values for {count} convolutions",
                where=group.where,
                fix="pass one value for all convolutions, or one value for each convolution",
            )
    for at, node in enumerate(members):
        for name, key in _PRICED.items():
            if name in group.options and key not in marks(node):
                values = group.options[name]
                note_on(node, **{key: values[at if len(values) > 1 else 0]})
    if not group.options:
        return
    idle = ", ".join(sorted({*group.options} - {*_PRICED}))
    log.python.warning(
        "poptorch.MultiConv: the estimate runs the convolutions one after another%s (%s)",
        f"; no effect: {idle}" if idle else "",
        group.where,
    )
