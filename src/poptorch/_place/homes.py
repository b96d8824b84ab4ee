"""State tensors -> the chips that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from .._base.errors import Error
from .._ir.blocks import Stage, pass_of
from .._ir.graph import Graph
from .._ir.slots import Kind, Slot

_EVERYWHERE = (Kind.HYPER, Kind.RNG)


def find_homes(graph: Graph, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Return the chips of every state input of a placed graph, by slot key.

    Raises:
        Error: a weight that several chips read, or a buffer that one chip changes and another
            reads.
    """
    chips = tuple(sorted({stage.chip for stage in stages}))
    writers = _writers(graph)
    homes = {}
    for node, slot in zip(graph.placeholders, graph.inputs, strict=True):
        if not slot.is_state:
            continue
        if slot.kind in _EVERYWHERE:
            homes[slot.key] = chips
            continue
        touching = [*node.users, *([writers[slot.key]] if slot.key in writers else [])]
        readers = _by_chip(touching, stages)
        if len(readers) > 1 and (slot.kind is Kind.PARAM or slot.key in writers):
            raise _shared(slot, readers)
        homes[slot.key] = tuple(sorted(readers)) or chips[:1]
    return homes


def _writers(graph: Graph) -> dict[str, fx.Node]:
    """Buffers and constants that forward changes, with the node of the new value."""
    read = {slot.key for slot in graph.inputs if slot.is_state}
    pairs = zip(graph.outputs, graph.returned, strict=True)
    return {slot.key: node for slot, node in pairs if slot.key in read}


def _by_chip(nodes: Sequence[fx.Node], stages: Sequence[Stage]) -> dict[int, Stage]:
    """Chips that some nodes run on, with the first stage of each."""
    passes = filter(None, map(pass_of, nodes))
    by_chip: dict[int, Stage] = {}
    for each in passes:
        by_chip.setdefault(stages[each.stage].chip, stages[each.stage])
    return by_chip


def _shared(slot: Slot, readers: Mapping[int, Stage]) -> Error:
    where = ", ".join(f"IPU {chip} ({stage.name})" for chip, stage in sorted(readers.items()))
    if slot.kind is Kind.PARAM:
        return Error(
            f"Parameter '{slot.path}' is shared by several IPUs",
            got=f"it is read on {where}",
            fix="place the layers that share weights on the same IPU",
        )
    return Error(
        f"Buffer '{slot.path}' is changed on one IPU and used on another",
        got=f"it is used on {where}",
        fix="place everything that uses the buffer on the same IPU",
    )
