"""A captured graph as a row of units: the stretches between places where a block may begin.

A block begins where a module's ``forward`` does, so those places are modules that are entered
once. Each unit knows its cost, backward pass included, and what crosses its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .._ipu_model.cycles import node_cycles, value_bytes
from .._ir.blocks import StagePass, Visit, label_of, pass_of, relabel
from .._ir.graph import Graph
from .._ir.operators import storage_root
from .._ir.slots import Kind
from .._ops import annotate
from .._systems import ChipKind
from .passes import with_passes


@dataclass(frozen=True)
class Unit:
    """A stretch of a model that stays on one chip.

    Attributes:
        begins: path of the module whose ``forward`` begins it; None for what comes before any.
        cycles: of one micro-batch, forward and backward.
        weight_bytes: parameters, their gradients and optimizer state, and buffers.
        saved_bytes: what its forward pass keeps of one micro-batch for the backward pass.
        entering_bytes: what crosses its beginning in the forward pass.
        joined: whether it has to be on the chip of the unit before it.
    """

    begins: str | None
    cycles: float
    weight_bytes: int
    saved_bytes: int
    entering_bytes: int
    joined: bool


def find_units(
    graph: Graph, state_bytes: Mapping[str, int], modules: Sequence[str], kind: ChipKind
) -> list[Unit]:
    """Cut a micro graph at every place where a block may begin.

    Args:
        graph: one micro-batch, forward and backward.
        state_bytes: of every parameter and buffer by path, with all that training keeps for it.
        modules: paths of the modules that ``forward`` may enter.
        kind: of the chips.
    """
    graph = graph.copy()
    forward = [node for node in graph.module.graph.nodes if _is_forward(node)]
    entries = _entries(forward, modules)
    starts = sorted({0, *entries})
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(forward)
        for node in forward[start:end]:
            relabel(node, replace(label_of(node), visit=number, stage_pass=None))
    _label_backward(graph, forward)
    graph = with_passes(graph, {number: number for number in range(len(starts))}, len(starts))
    return _measured(graph, [entries.get(start) for start in starts], state_bytes, kind)


def cut_at(graph: Graph, begins: Sequence[str]) -> tuple[Graph, tuple[Visit, ...]]:
    """Return a micro graph in other blocks, one per chip, and the visits that its labels count.

    Args:
        graph: one micro-batch, forward and backward; its own blocks are not looked at.
        begins: paths of the modules that begin the chips after the first.
    """
    graph = graph.copy()
    forward = [node for node in graph.module.graph.nodes if _is_forward(node)]
    starts = {0, *_entries(forward, begins)}
    chip = -1
    for at, node in enumerate(forward):
        chip += at in starts
        relabel(node, replace(label_of(node), visit=chip, stage_pass=None))
    _label_backward(graph, forward)
    for node, origin in annotate.origins(graph.module.graph).items():
        relabel(node, replace(label_of(origin), backward=True))
    return graph, (Visit(), *(Visit(str(chip), chip) for chip in range(1, len(starts))))


def _is_forward(node: fx.Node) -> bool:
    label = label_of(node)
    return node.op == "call_function" and label.visit is not None and not label.backward


def _entries(forward: Sequence[fx.Node], modules: Sequence[str]) -> dict[int, str]:
    """Position of the first operator -> the outermost module that is entered there, once."""
    stretches: dict[str, list[int]] = {path: [] for path in modules}
    before: set[str] = set()
    for at, node in enumerate(forward):
        parts = label_of(node).module.split(".")
        inside = {"", *(".".join(parts[: n + 1]) for n in range(len(parts)))}
        for path in inside - before:
            stretches.setdefault(path, []).append(at)
        before = inside
    entries: dict[int, str] = {}
    for path in sorted(modules, key=lambda p: (p.count(".") + bool(p), p)):
        starts = stretches[path]
        if len(starts) == 1:
            entries.setdefault(starts[0], path)
    return entries


def _label_backward(graph: Graph, forward: Sequence[fx.Node]) -> None:
    """Backward nodes belong to the unit of the module that they differentiate."""
    last_of = {label_of(node).module: label_of(node).visit for node in forward}
    for node in graph.module.graph.nodes:
        label = label_of(node)
        if label.backward:
            relabel(node, replace(label, visit=last_of.get(label.module), stage_pass=None))


def _measured(
    graph: Graph,
    begins: Sequence[str | None],
    state_bytes: Mapping[str, int],
    kind: ChipKind,
) -> list[Unit]:
    count = len(begins)
    cycles, weights, saved, entering = [0.0] * count, [0] * count, [0] * count, [0] * count
    joined = [False] * count
    kept = set[fx.Node]()
    for node in graph.module.graph.nodes:
        where = pass_of(node)
        if where is None:
            continue
        cycles[where.stage] += node_cycles(node, kind)
        if where.backward:
            continue
        readers = _readers(node)
        if any(reader.backward for reader in readers):
            kept.add(storage_root(node))
        last = max((r.stage for r in readers if not r.backward), default=where.stage)
        for crossed in range(where.stage + 1, last + 1):
            entering[crossed] += value_bytes(node)
    for node in kept:
        where = pass_of(node)
        if where is not None:
            saved[where.stage] += value_bytes(node)
    for node, slot in zip(graph.placeholders, graph.inputs, strict=True):
        if slot.kind not in (Kind.PARAM, Kind.BUFFER):
            continue
        stages = [reader.stage for reader in _readers(node)]
        first, last = (min(stages), max(stages)) if stages else (0, 0)
        weights[first] += state_bytes[slot.path]
        for unit in range(first + 1, last + 1):  # one weight lives on one chip
            joined[unit] = True
    return [
        Unit(*values)
        for values in zip(begins, cycles, weights, saved, entering, joined, strict=True)
    ]


def _readers(node: fx.Node) -> list[StagePass]:
    return [where for user in node.users if (where := pass_of(user)) is not None]
