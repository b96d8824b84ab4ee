"""Write a step as one page: its program, its operators by module, the state they use, and
the source.
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._base import pages
from .._ipu_model.estimate import Estimate
from .._ipu_model.profile import DIRECTIONS, direction_of
from .._ir.plan import Plan
from .._ir.program import Program, families
from .._ir.slots import Kind, Slot, type_text
from .rows import PageRow, owner_of, rows_of, runs_of


@dataclass(eq=False)
class Module:
    """The operators of one of the user's modules, or of the update of its weights, and its
    submodules.
    """

    path: str
    kind: str  # class name of the module
    own: list[PageRow] = field(default_factory=list)
    inner: dict[str, Module] = field(default_factory=dict)
    weights: int = 0  # bytes of weights and buffers
    cycles: float = 0.0  # estimated IPU cycles per call

    @property
    def by_direction(self) -> Iterator[tuple[str, list[PageRow]]]:
        for name in DIRECTIONS.values():
            if own := [each for each in self.own if each.direction == name]:
                yield name, own

    def all(self) -> Iterator[Module]:
        yield self
        for each in self.inner.values():
            yield from each.all()

    @property
    def totals(self) -> dict[str, float]:
        own = [row for module in self.all() for row in module.own]
        return {
            "operators": len(own),
            "flops": sum(each.flops for each in own),
            "weights": sum(each.weights for each in self.all()),
            "results": sum(each.bytes for each in own),
            "cycles": sum(each.cycles for each in self.all()),
        }

    def keys(self, of: Callable[[PageRow], Iterable[Slot]]) -> list[str]:
        """Return the names of the state that the module's own operators read or write."""
        return list(
            dict.fromkeys(slot.key for own in self.own for slot in of(own) if slot.is_state)
        )


def html(
    plan: Plan, title: str, inputs: Sequence[str], kinds: Mapping[str, str], price: Estimate | str
) -> str:
    """Return the page.

    Args:
        plan: the compiled program.
        title: heading of the page.
        inputs: names of the inputs.
        kinds: class names of modules, by path.
        price: the estimate, or why there is none.
    """
    program, rows = plan.program, rows_of(plan.program, inputs)
    root = _modules(program, rows, kinds)
    why, priced = (price, None) if isinstance(price, str) else ("", price)
    cycles = _add_prices(root, priced) if priced is not None else {}
    names = dict.fromkeys(each.place[0] for each in rows if each.place is not None)
    sources = [(name, [line.rstrip("\n") for line in linecache.getlines(name)]) for name in names]
    lines = {(name, at) for name, own in sources for at in range(1, len(own) + 1)}
    return pages.template(Path(__file__).with_name("step.html")).render(
        title=title, plan=plan, root=root, totals=root.totals, price=priced, why=why,
        parts=list(_parts(program, rows, cycles)), program=list(_lines(program, rows)),
        copies=list(_copies(program, inputs)), state=list(_state(program, rows)),
        sources=sources, files={name: at for at, name in enumerate(names)}, lines=lines,
        counts=Counter(each.place for each in rows),
        first={each.place: each.number for each in reversed(rows)},
        flops=_flops_text, file_name=lambda name: Path(name).name,
        reads=operator.attrgetter("reads"), writes=operator.attrgetter("writes"),
    )  # fmt: skip


def _modules(program: Program, rows: Sequence[PageRow], kinds: Mapping[str, str]) -> Module:
    root = Module("", kinds.get("", ""))

    def module(path: str) -> Module:
        found, names = root, path.split(".") if path else []
        for at, name in enumerate(names, 1):
            own = ".".join(names[:at])
            found = found.inner.setdefault(name, Module(own, kinds.get(own, "")))
        return found

    for each in rows:
        module(each.module).own.append(each)
    for slot in program.visible_slots().values():
        if slot.kind in (Kind.PARAM, Kind.BUFFER):
            module(owner_of(slot)).weights += _state_bytes(slot)
    return root


def _add_prices(root: Module, price: Estimate) -> dict[str, float]:
    """Add estimated cycles to modules, and return the sums by direction."""
    known = {module.path: module for module in root.all()}
    cycles: dict[str, float] = defaultdict(float)
    for each in price.operators:
        path = each.module
        while path not in known and "/" in path:  # name scopes precede the module
            path = path.partition("/")[2]
        known.get(path, root).cycles += each.cycles
        cycles[DIRECTIONS[direction_of(each.stage_pass)]] += each.cycles
    return cycles


def _lines(program: Program, rows: Sequence[PageRow]) -> Iterator[tuple[str, str, int | None]]:
    """Yield the lines of the program as (indentation, text, number of the run's first operator)."""
    first = {each.graph: each.number for each in reversed(rows)}
    for line in str(program).splitlines():
        code = line.lstrip()
        graph = re.match(r"run ([^(]+)\(", code)
        yield line.removesuffix(code), code, first.get(graph[1]) if graph else None


def _parts(
    program: Program, rows: Sequence[PageRow], cycles: Mapping[str, float]
) -> Iterator[tuple[str, int, list[PageRow], float, str, str]]:
    """Yield what each graph does in each direction, and which kinds of tensors it reads
    and writes.
    """
    parts: dict[tuple[str, str], list[PageRow]] = defaultdict(list)
    for each in rows:
        parts[each.graph, each.direction].append(each)
    graphs, runs = Counter(direction for _, direction in parts), runs_of(program.body)
    for (graph, direction), own in parts.items():
        priced = cycles.get(direction, 0.0) if graphs[direction] == 1 else 0.0
        reads = families(slot for each in own for slot in each.reads)
        writes = families(slot for each in own for slot in each.writes)
        name = graph if graph in (direction, "squares") else f"{graph}, {direction}"
        yield name, runs[graph], own, priced, ", ".join(reads), ", ".join(writes)


def _copies(program: Program, inputs: Sequence[str]) -> Iterator[tuple[str, str, str, int, str]]:
    """Yield the transfers between host and device: source, tensor, type, bytes, time."""
    loops, emit, state = program.loops, program.emit, program.visible_slots().values()
    size = sum(_state_bytes(slot) for slot in state if slot.kind is not Kind.ACCUM)
    changed = "when the model is attached, and again after the host copy changes"
    yield "host", "weights, buffers, state", "", size, changed
    given = {s.index: s for graph in program.graphs.values() for s in graph.inputs
             if s.kind is Kind.BATCH}  # fmt: skip
    for at, slot in sorted(given.items()):
        size = _bytes(slot) * (loops.slices if slot.replica_shape else 1)
        yield "host", inputs[at], _type(slot), size, "in each call"
    for slot in emit.slots:
        mode, period = emit.mode_of(slot.key)
        when = f"in each call: {mode.name}{f' {period}' if period > 1 else ''}"
        yield "device", slot.key, _type(slot), _bytes(slot) * emit.count(slot.key, loops), when
    size = sum(_state_bytes(slot) for slot in state if slot.kind in (Kind.PARAM, Kind.BUFFER))
    yield "device", "weights, buffers", "", size, "when the host reads them after they have changed"


def _state(
    program: Program, rows: Sequence[PageRow]
) -> Iterator[tuple[Slot, int, str, list[int], list[int]]]:
    """Yield all state as (slot, bytes, bundle that contains it, readers, writers)."""
    read, written = defaultdict(list), defaultdict(list)
    for each in rows:
        for slot in each.reads:
            read[slot.key].append(each.number)
        for slot in each.writes:
            written[slot.key].append(each.number)
    views = {view.slot.key: view for view in program.views()}
    slots = program.state_slots() | {key: view.slot for key, view in views.items()}
    for slot in sorted(slots.values(), key=lambda slot: slot.weight or slot.path):
        flat = views[slot.key].flat if slot.key in views else ""
        yield slot, _state_bytes(slot), flat, read[slot.key], written[slot.key]


def _state_bytes(slot: Slot) -> int:
    return math.prod(slot.device_shape) * slot.dtype.itemsize


# Inputs and results of one micro-batch.


def _type(slot: Slot) -> str:
    return type_text(slot.dtype, slot.replica_shape)


def _bytes(slot: Slot) -> int:
    return math.prod(slot.replica_shape) * slot.dtype.itemsize


def _flops_text(count: float) -> str:
    power = min(int(math.log10(count)) // 3, 4) if count >= 1000 else 0
    return f"{count / 1000**power:.3g} {' kMGT'[power].strip()}FLOP"
