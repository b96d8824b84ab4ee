"""Compile the last update of a batch that is shorter than usual: micro-batches of two sizes in one
graph.

Micro-batches of the usual size are captured once and may run side by side. The shorter one that
follows is captured separately. Their graphs are joined into one, which passes buffers on, sums the
gradients and joins the results. All later passes treat it as the graph of a single micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from .. import _capture
from .._base.errors import Error
from .._ir import slots
from .._ir.graph import Graph, SlotFunction, compose
from .._ir.micro_batches import Lanes, Loops
from .._ir.plan import RESULTS
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from .._ir.tensors import TensorsByKey
from ..enums import OutputMode, ReductionType
from . import lanes
from .eager_check_policy import EagerCheck
from .lower import lower

_T = TypeVar("_T")
_WHOLE = (
    "pass as many rows as a complete batch has, or a multiple, or leave out the last batch: "
    "drop_last=True"
)
CheckOf = Callable[[_capture.Request], EagerCheck]


@dataclass(frozen=True, eq=False)
class Remainder:
    """What is captured for such an update. Each request represents one or more micro-batches."""

    requests: tuple[_capture.Request, ...]  # one for each size
    counts: tuple[int, ...]  # micro-batches of each size
    replicas: int = 1  # micro-batches are assigned to the replicas in rotation


@dataclass(frozen=True, eq=False)
class _GraphRun:
    """One run of a captured graph: a micro-batch, or several side by side."""

    graph: Graph
    name: str
    first: int  # the index of its first micro-batch
    lanes: Lanes | None

    @property
    def count(self) -> int:
        return 1 if self.lanes is None else self.lanes.count

    def own(self, slot: Slot) -> Slot:
        """Return the slot of a value that only this run reads or writes."""
        return slots.value(f"{self.name}.{slot.key}", slot.shape, slot.dtype)

    def rows(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a value that it reads or returns, without lanes."""
        if self.lanes is None or not slot.lanes:
            return slot.shape
        inner = slot.shape[1:]
        return (slot.shape[0] * inner[0], *inner[1:]) if inner else slot.shape


def capture(remainder: Remainder, spec: Spec, check_of: CheckOf) -> _capture.Micro:
    """Capture micro-batches of each size, compare them with eager PyTorch, and join them.

    Raises:
        Error: the micro-batches cannot be joined.
    """
    micros, runs, before = list[_capture.Micro](), list[_GraphRun](), 0
    for request, count in zip(remainder.requests, remainder.counts, strict=True):
        check = check_of(request)
        micro = _capture.capture(request, check.before_capture())
        micro = check.micro_batch(micro, partial(_capture.capture, request, check.before))
        if micro.exchanging:
            raise Error(
                "Replicas that exchange tensors cannot share a short batch",
                got=f"{sum(remainder.counts)} micro-batches for {remainder.replicas} replicas",
                fix=_WHOLE,
            )
        micro = micro if not micros else _with_common_constants(micro, micros[0])
        micros.append(micro)
        several, together = _side_by_side(micro, request, count, remainder, spec, check)
        step = 1 if together is None else together.count
        graph = replace(several, name=f"size{len(micros)}")
        for at in range(0, count, step):
            runs.append(_GraphRun(graph, f"{len(micros)}.{at}", before + at, together))
        before += count
    joined = _Joined(runs, remainder.replicas, spec).graph()
    first, last = micros[0], micros[-1]
    return replace(
        first,
        graph=joined,
        constants={key: value for micro in micros for key, value in micro.constants.items()},
        outputs=last.outputs,
        host_outputs=last.host_outputs,
        decided=tuple(each for micro in micros for each in micro.decided),
        read=tuple(each for micro in micros for each in micro.read),
        drawn=sum(micro.drawn for micro in micros),
        lost=any(micro.lost for micro in micros),
    )


def _side_by_side(
    micro: _capture.Micro,
    request: _capture.Request,
    count: int,
    remainder: Remainder,
    spec: Spec,
    check: EagerCheck,
) -> tuple[Graph, Lanes | None]:
    """Return a graph of several micro-batches of one size if this is correct and saves time, or of
    one.

    Random numbers of lanes come from seeds that only a whole program has.
    """
    changes = any(slot.kind in slots.EVOLVING for slot in micro.graph.outputs)
    if count == 1 or micro.graph.random or (changes and remainder.replicas > 1):
        return micro.graph, None
    loops = Loops(accumulation=count) if spec.training else Loops(iterations=count)
    own = replace(spec, loops=loops, recompute=False)
    batched = lanes.choose(micro, request, own, check)
    return (micro if batched.lanes is None else batched.micro).graph, batched.lanes


def _with_common_constants(micro: _capture.Micro, first: _capture.Micro) -> _capture.Micro:
    """Give constants that another capture has found, too, the same numbers, and other constants new
    ones.
    """
    known = {id(value): key for key, value in first.constants.items()}
    keys: dict[str, Slot] = {}
    given = {slot.key: slot for slot in first.graph.inputs}
    free = 1 + max((slot.index for slot in given.values() if slot.kind is Kind.CONSTANT), default=0)
    for slot in micro.graph.inputs:
        if slot.kind is Kind.CONSTANT:
            same = known.get(id(micro.constants[slot.key]))
            keys[slot.key] = given[same] if same in given else replace(slot, index=free)
            free += 1

    def renamed(ends: Sequence[Slot]) -> tuple[Slot, ...]:
        return tuple(keys.get(slot.key, slot) for slot in ends)

    graph = replace(
        micro.graph, inputs=renamed(micro.graph.inputs), outputs=renamed(micro.graph.outputs)
    )
    constants = {keys[key].key: value for key, value in micro.constants.items() if key in keys}
    return replace(micro, graph=graph, constants=constants)


@dataclass(eq=False)
class _Joined:
    runs: Sequence[_GraphRun]
    replicas: int
    spec: Spec
    count: int = field(init=False)  # micro-batches
    evolving: Mapping[str, Slot] = field(init=False)  # values that differ between replicas

    def __post_init__(self) -> None:
        self.count = sum(run.count for run in self.runs)
        written = [slot for run in self.runs for slot in run.graph.outputs]
        separate = written if self.replicas > 1 else []
        self.evolving = {slot.key: slot for slot in separate if slot.kind in slots.EVOLVING}

    def graph(self) -> Graph:
        parts = [lower(self._divided()), *map(self._renamed, self.runs), lower(self._finished())]
        own = {slot.key for part in parts for slot in part.outputs if slot.kind is Kind.VALUE}
        return compose("micro", parts, keep=(Kind.GRADIENT,), drop=own)

    # The inputs and outputs of runs.

    def _of_replica(self, slot: Slot, replica: int) -> Slot:
        return slots.value(f"replica{replica}.{slot.key}", slot.shape, slot.dtype)

    def _renamed(self, run: _GraphRun) -> Graph:
        """Return a run's graph with its own slots, unless all runs share them."""

        def slot_of(slot: Slot) -> Slot:
            if slot.key in self.evolving:
                return self._of_replica(slot, run.first % self.replicas)
            return run.own(slot) if slot.kind in (*RESULTS, Kind.GRADIENT, Kind.VALUE) else slot

        inputs, outputs = (
            tuple(map(slot_of, ends)) for ends in (run.graph.inputs, run.graph.outputs)
        )
        return replace(run.graph, inputs=inputs, outputs=outputs)

    def _stacked(self, slot: Slot) -> Slot:
        return replace(slot, shape=(self.replicas, *slot.shape), replicas=self.replicas, lanes=True)

    def _divided(self) -> SlotFunction:
        """Return a function that divides the batch, and the state that differs between replicas."""
        wholes = {slot.index: self._whole(slot) for slot in self._batch(self.runs[0])}
        stacked = {key: self._stacked(slot) for key, slot in self.evolving.items()}
        outputs = [run.own(slot) for run in self.runs for slot in self._batch(run)]
        outputs += [
            self._of_replica(slot, replica)
            for slot in self.evolving.values()
            for replica in range(self.replicas)
        ]

        def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
            results = {}
            for index, whole in wholes.items():
                at = 0
                for run in self.runs:
                    (slot,) = (each for each in self._batch(run) if each.index == index)
                    rows = run.rows(slot)[:1]
                    part = tensors[whole.key][at : at + rows[0]] if rows else tensors[whole.key]
                    at += sum(rows)
                    results[run.own(slot).key] = part.reshape(slot.shape).clone()
            for key, slot in self.evolving.items():
                for replica in range(self.replicas):
                    own = self._of_replica(slot, replica)
                    results[own.key] = tensors[stacked[key].key][replica].clone()
            return results

        inputs = (*wholes.values(), *stacked.values())
        return SlotFunction("divide", function, inputs, tuple(outputs))

    def _batch(self, run: _GraphRun) -> list[Slot]:
        return [slot for slot in run.graph.inputs if slot.kind is Kind.BATCH]

    def _whole(self, like: Slot) -> Slot:
        found = [(run, slot) for run in self.runs for slot in self._batch(run)]
        shapes = [run.rows(slot) for run, slot in found if slot.index == like.index]
        if not shapes[0]:
            return slots.batch_input(like.index, (), like.dtype)
        rows = sum(shape[0] for shape in shapes)
        return slots.batch_input(like.index, (rows, *shapes[0][1:]), like.dtype)

    # The results.

    def _finished(self) -> SlotFunction:
        """Return a function that sums gradients and joins results."""
        values, results = dict[str, Slot](), dict[str, Slot]()
        made: dict[str, Callable[[TensorsByKey], torch.Tensor]] = {}
        for key, found in self._outputs().items():
            slot = found[0][1]
            values |= {own.key: own for own in (run.own(each) for run, each in found)}
            if slot.kind is Kind.GRADIENT:
                results[key], made[key] = self._gradient(found)
            elif slot.kind is not Kind.VALUE:
                results[key], made[key] = self._result(found)
        for key, slot in self.evolving.items():
            own = [self._of_replica(slot, replica) for replica in range(self.replicas)]
            values |= {each.key: each for each in own}
            results[key] = self._stacked(slot)
            made[key] = _stack(own)

        def function(tensors: TensorsByKey) -> dict[str, torch.Tensor]:
            return {key: make(tensors) for key, make in made.items()}

        return SlotFunction("join", function, tuple(values.values()), tuple(results.values()))

    def _outputs(self) -> dict[str, list[tuple[_GraphRun, Slot]]]:
        found: dict[str, list[tuple[_GraphRun, Slot]]] = {}
        for run in self.runs:
            for slot in run.graph.outputs:
                if slot.kind in (*RESULTS, Kind.GRADIENT):
                    found.setdefault(slot.key, []).append((run, slot))
        for pairs in found.values():
            if pairs[0][1].kind is not Kind.GRADIENT and len(pairs) != len(self.runs):
                raise Error(
                    "forward returns a different number or shape of results for a shorter batch",
                    got=(
                        f"{len(pairs)} of {len(self.runs)} parts of the batch return "
                        f"{pairs[0][1].key}"
                    ),
                    fix=(
                        "let forward return the same results for any number of rows",
                        f"or {_WHOLE}",
                    ),
                )
        return found

    def _gradient(
        self, found: Sequence[tuple[_GraphRun, Slot]]
    ) -> tuple[Slot, Callable[[TensorsByKey], torch.Tensor]]:
        dtype = found[0][1].dtype
        wide = torch.float32 if dtype is torch.float16 and len(found) > 1 else dtype
        mean = self.spec.reduction.type == ReductionType.Mean
        divisor = self.count if mean else 1

        def added(tensors: TensorsByKey) -> torch.Tensor:
            total = sum(tensors[run.own(slot).key].to(wide) for run, slot in found)
            assert isinstance(total, torch.Tensor)
            return total / divisor if divisor > 1 else total

        return replace(found[0][1], dtype=wide), added

    def _result(
        self, found: Sequence[tuple[_GraphRun, Slot]]
    ) -> tuple[Slot, Callable[[TensorsByKey], torch.Tensor]]:
        slot = found[0][1]
        mode = OutputMode.All if slot.kind is Kind.BATCH else self._mode_of(slot)
        shapes: list[tuple[int, ...]] = []
        for run, own in found:
            shapes += [own.shape[1:] if own.lanes else own.shape] * run.count
        if mode is OutputMode.Sum and len({*shapes}) > 1:
            raise Error(
                "OutputMode.Sum cannot add results of micro-batches of different sizes",
                got=f"{slot.key} has the shapes {', '.join(map(str, dict.fromkeys(shapes)))}",
                fix=(_WHOLE, "or return results without a batch dimension"),
            )
        scalar, kept = not shapes[0], self._groups(shapes, mode)
        added = mode is OutputMode.Sum

        def joined(tensors: TensorsByKey) -> torch.Tensor:
            each: list[torch.Tensor] = []
            for run, own in found:
                value = tensors[run.own(own).key]
                each += [value[at] for at in range(run.count)] if own.lanes else [value]
            groups = self._groups(each, mode)
            results = [_sum(group) if added else group[-1] for group in groups]
            if len(results) == 1:
                return results[0].clone()
            return torch.stack(results) if scalar else torch.cat(results)

        rows = [group[-1] for group in kept]
        shape = rows[0]
        if len(rows) > 1:
            first = len(rows) if scalar else sum(each[0] for each in rows)
            shape = (first, *shape[1:])
        widens = added and slot.dtype in slots.SMALL_INTEGERS and len(kept[0]) > 1
        dtype = torch.int32 if widens else slot.dtype
        return replace(slot, shape=shape, dtype=dtype, lanes=False), joined

    def _groups(self, values: Sequence[_T], mode: OutputMode) -> list[Sequence[_T]]:
        """Return the results of each micro-batch or, in some modes, of each replica."""
        if mode in (OutputMode.Final, OutputMode.Sum):
            used = min(self.replicas, len(values))
            return [values[replica :: self.replicas] for replica in range(used)]
        return [[value] for value in values]

    def _mode_of(self, slot: Slot) -> OutputMode:
        modes = {short: mode for short, _, mode, _ in self.spec.anchors}
        return modes[slot.name] if slot.kind is Kind.ANCHOR else self.spec.output.mode


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if len(values) > 1 and first.dtype in slots.SMALL_INTEGERS:
        values = [value.to(torch.int32) for value in values]
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _stack(own: Sequence[Slot]) -> Callable[[TensorsByKey], torch.Tensor]:
    return lambda tensors: torch.stack([tensors[each.key] for each in own])
