"""Choose a model's blocks: divide a sequence of units so that the slowest chip is as fast as
possible.

A unit is the part between two modules that are each entered once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from .._base.errors import Error
from .._cost.live_bytes import value_bytes
from .._ir.block_labels import Visit, label_of, pass_of, reader_passes, relabel
from .._ir.graph import Graph
from .._ir.operators import storage_root
from .._ir.slots import Kind
from .._ops import annotate
from .stages import with_passes


@dataclass
class Unit:
    begins: str | None  # path of the module whose forward starts it; None before the first module
    cycles: float = 0.0  # for one micro-batch, forward and backward
    weight_bytes: int = 0  # parameters, their gradients and optimizer state, and buffers
    saved_bytes: int = 0  # stored for the backward pass, for one micro-batch
    entering_bytes: int = 0  # what enters it in the forward pass
    joined: bool = False  # whether it must be on the chip of the previous unit


def find_units(
    graph: Graph,
    state_bytes: Mapping[str, int],
    modules: Sequence[str],
    cycles_of: Callable[[fx.Node], float],
) -> list[Unit]:
    """Return the units.

    ``state_bytes`` contains parameters and buffers by path, with everything that training stores
    for them. ``cycles_of`` estimates one operator on the chips over which the model is divided.
    """
    graph, begins = _in_blocks(graph, modules)
    graph = with_passes(graph, {number: number for number in range(len(begins))}, len(begins))
    units = [Unit(path) for path in begins]
    kept = set[fx.Node]()
    for node in graph.operators:
        where = pass_of(node)
        assert where is not None
        units[where.stage].cycles += cycles_of(node)
        if where.backward:
            continue
        readers = reader_passes(node)
        if any(reader.backward for reader in readers):
            kept.add(storage_root(node))
        last = max((r.stage for r in readers if not r.backward), default=where.stage)
        for crossed in units[where.stage + 1 : last + 1]:
            crossed.entering_bytes += value_bytes(node)
    for node in kept:
        where = pass_of(node)
        if where is not None:  # not an input
            units[where.stage].saved_bytes += value_bytes(node)
    for node, slot in graph.arguments.items():
        if slot.kind not in (Kind.PARAM, Kind.BUFFER):
            continue
        stages = [reader.stage for reader in reader_passes(node)] or [0]
        units[min(stages)].weight_bytes += state_bytes[slot.path]
        for unit in units[min(stages) + 1 : max(stages) + 1]:  # one weight is on one chip only
            unit.joined = True
    return units


def cut_at(graph: Graph, begins: Sequence[str]) -> tuple[Graph, tuple[Visit, ...]]:
    graph, begun = _in_blocks(graph, begins)
    for node, origin in annotate.origins(graph.module.graph).items():
        relabel(node, replace(label_of(origin), backward=True))
    return graph, (Visit(), *(Visit(str(chip), chip) for chip in range(1, len(begun))))


def _in_blocks(graph: Graph, modules: Sequence[str]) -> tuple[Graph, list[str | None]]:
    """Return a graph whose labels count visits of the given modules, and the module that starts
    each visit.
    """
    graph = graph.copy()
    labels = {node: label_of(node) for node in graph.operators}
    forward = [n for n, label in labels.items() if label.visit is not None and not label.backward]
    entries = _entries(forward, modules)
    starts = sorted({0, *entries})
    for at, node in enumerate(forward):
        visit = bisect.bisect(starts, at) - 1
        relabel(node, replace(label_of(node), visit=visit, stage_pass=None))
    # Backward nodes belong to the unit of the module that they differentiate.
    last_of = {label_of(node).module: label_of(node).visit for node in forward}
    for node in graph.module.graph.nodes:
        label = label_of(node)
        if label.backward:
            relabel(node, replace(label, visit=last_of.get(label.module), stage_pass=None))
    return graph, [entries.get(start) for start in starts]


def _entries(forward: Sequence[fx.Node], modules: Sequence[str]) -> dict[int, str]:
    """Map the index of the first operator to the outermost module that is entered there
    and only once.
    """
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


@dataclass(frozen=True)
class ChipShare:
    ipu: int
    begins: str | None  # path of the module that starts its block; None on the first chip
    cycles: float  # for one micro-batch
    weight_bytes: int  # parameters, gradients, optimizer state, buffers
    saved_bytes: int  # stored for the backward pass, for all micro-batches in flight
    entering_bytes: int  # received from earlier chips, for one micro-batch

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.saved_bytes


def balance(units: Sequence[Unit], chips: int, limit: int, pipelined: bool) -> list[ChipShare]:
    """Divide the units so that the slowest chip is as fast as possible, and then so that few bytes
    are sent.
    """
    places = [
        n for n, unit in enumerate(units) if n and unit.begins is not None and not unit.joined
    ]
    if len(places) < chips - 1:
        raise Error(
            f"The model cannot be divided into {chips} parts",
            got=f"a block can begin at only {len(places) + 1} places of the model",
            fix=("use fewer IPUs", "or move parts of forward into separate modules"),
        )
    ends = [*places, len(units)]
    # The number of micro-batches whose activations a chip stores.
    kept = [2 * (chips - 1 - chip) + 1 if pipelined else 1 for chip in range(chips)]
    fastest = _best(units, ends, kept, lambda slowest, s: max(slowest, s.cycles), limit)
    if fastest is None:
        weights = sum(unit.weight_bytes for unit in units)
        largest = max(units, key=lambda unit: unit.weight_bytes + unit.saved_bytes)
        raise Error(
            f"No placement on {chips} IPUs fits their memory",
            got=f"{limit:,} bytes per chip; the model keeps {weights:,} bytes of weights and "
            f"state, and '{largest.begins or '(start)'}' alone needs "
            f"{largest.weight_bytes + largest.saved_bytes:,} bytes",
            fix=(
                "use more IPUs, a smaller micro-batch or half precision",
                (
                    "or divide large modules into smaller ones: a block can only begin at the "
                    "forward of a module"
                ),
            ),
        )
    # Not in one pass, because the fastest first part may send more than another that is fast
    # enough.
    best = _best(units, ends, kept, lambda sent, s: sent + s.entering_bytes, limit, fastest[0])
    assert best is not None, "the fastest is among them"
    return best[1]


def _best(
    units: Sequence[Unit],
    ends: Sequence[int],
    kept: Sequence[int],
    joined: Callable[[float, ChipShare], float],
    most_bytes: int,
    most_cycles: float = math.inf,
) -> tuple[float, list[ChipShare]] | None:
    before: dict[int, tuple[float, list[ChipShare]]] = {0: (0.0, [])}  # by the end of the last part
    for chip, micro_batches in enumerate(kept):
        best: dict[int, tuple[float, list[ChipShare]]] = {}
        for start, (score, shares) in before.items():
            for end in (place for place in ends if place > start):
                part = units[start:end]
                share = ChipShare(
                    chip,
                    part[0].begins,
                    sum(unit.cycles for unit in part),
                    sum(unit.weight_bytes for unit in part),
                    micro_batches * sum(unit.saved_bytes for unit in part),
                    part[0].entering_bytes,
                )
                if share.bytes > most_bytes or share.cycles > most_cycles:
                    break
                together = joined(score, share)
                if end not in best or together < best[end][0]:
                    best[end] = (together, [*shares, share])
        before = best
    return before.get(len(units))
