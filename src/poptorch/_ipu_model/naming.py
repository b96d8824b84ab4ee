"""What takes memory, by the names that users know: tensor, module and their line."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from .._base import source
from .._ir.blocks import StagePass, label_of, line_of
from .._ir.slots import Kind, Slot
from . import memory
from .estimate import ChipEstimate, Culprit, LiveTensor
from .memory import ChipMemory
from .priced import PassPrice, Subject

SHOWN = 12
"""So many tensors of a chip are listed."""

_CATEGORY = {
    Kind.PARAM: memory.WEIGHTS, Kind.BUFFER: memory.WEIGHTS, Kind.CONSTANT: memory.WEIGHTS,
    Kind.OPTSTATE: memory.OPTIMIZER, Kind.ACCUM: memory.ACCUMULATORS,
    Kind.VALUE: memory.ACTIVATIONS, Kind.BATCH: memory.ACTIVATIONS,
}  # fmt: skip


class Names:
    """Knows the tensors of a program.

    Args:
        subject: the program.
        passes: the prices of its passes.
    """

    def __init__(self, subject: Subject, passes: Mapping[StagePass, PassPrice]) -> None:
        self._passes = passes
        self._slots: dict[str, Slot] = {}
        self._makers: dict[str, fx.Node] = {}
        self._readers: dict[str, fx.Node] = {}
        for graph in subject.staged.graphs.values():
            for slot, node in zip(graph.outputs, graph.returned, strict=True):
                self._slots.setdefault(slot.key, slot)
                if slot.kind is Kind.VALUE and node.op == "call_function":
                    self._makers.setdefault(slot.key, node)
            for slot, node in zip(graph.inputs, graph.placeholders, strict=True):
                self._slots.setdefault(slot.key, slot)
                if node.users:
                    self._readers.setdefault(slot.key, next(iter(node.users)))
                    if slot.kind is Kind.PARAM:
                        self._readers.setdefault(slot.weight, next(iter(node.users)))

    def culprit(self, chips: tuple[ChipEstimate, ...], held: Mapping[int, ChipMemory]) -> Culprit:
        """Return what takes most on the fullest chip."""
        fullest = max(chips, key=lambda chip: chip.bytes)
        real = {k: v for k, v in fullest.peak.items() if k != memory.GAPS}
        category = max(real, key=lambda name: real[name])
        tensor, node = self._largest(category, held[fullest.chip])
        module, line = _place(node)
        return Culprit(
            fullest.chip, fullest.peak_at, category, tensor, module, line, real[category],
            100 * (fullest.bytes / fullest.limit - 1),
        )  # fmt: skip

    def live(self, held: ChipMemory) -> tuple[LiveTensor, ...]:
        """Return the largest tensors of a chip at its fullest moment."""
        sizes = {**held.state, **held.waiting}
        rows = []
        for key in sorted(sizes, key=lambda name: -sizes[name])[:SHOWN]:
            module, line = _place(self._node_of(key))
            rows.append(LiveTensor(key, self._category(key), sizes[key], module, line))
        return tuple(rows)

    def _category(self, key: str) -> str:
        return _CATEGORY.get(self._slots[key].kind, memory.WEIGHTS)

    def _largest(self, category: str, held: ChipMemory) -> tuple[str, fx.Node | None]:
        """The largest tensor of a category, and an operator that makes or reads it."""
        sizes = {
            key: size
            for key, size in {**held.state, **held.waiting}.items()
            if self._category(key) == category
        }
        own = None if held.at is None else self._passes[held.at.stage_pass].inside.transient
        if own is not None and own.at is not None:
            inside = {memory.TEMPORARY: own.temporary, memory.ACTIVATIONS: own.values}
            if inside.get(category, 0.0) > max(sizes.values(), default=0.0):
                return own.at.name, own.at
        if not sizes:
            return "", None
        key = max(sizes, key=lambda name: sizes[name])
        return key, self._node_of(key)

    def _node_of(self, key: str) -> fx.Node | None:
        """An operator that makes a value, or else the first that reads it or its weight."""
        if key in self._makers:
            return self._makers[key]
        weight = self._slots[key].weight
        return self._readers.get(weight) or self._readers.get(key)


def _place(node: fx.Node | None) -> tuple[str, str]:
    """The module and the user's line of an operator."""
    if node is None:
        return "", ""
    line = line_of(node)
    return label_of(node).path, source.describe(*line) if line else ""
