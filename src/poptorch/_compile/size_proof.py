"""Prove that a program with symbolic sizes is the program that each size would have.

``forward`` ran with sizes that behave like numbers. The graph shows whether it treated them like
numbers: with the sizes of an earlier program, the graph must have the operators, arguments and
constants of that program. If conditions exclude these sizes, for example because ``forward``
branches on them, the model is captured once more with the sizes of this call as numbers.

A size may equal a number of the model by chance, such as its number of heads, and ``forward`` or an
operator may compare the two. In this case, capturing with other sizes succeeds. The sizes of this
call then get their own program, and one program can still serve all other sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _capture
from .._base import source
from .._ir import symbolic
from .._ir.block_labels import line_of
from .._ir.conditions import LEAST
from .._ir.indices import along_symbols
from .._ir.operators import name_of
from .._ir.plan import Plan
from .._ir.slots import Slot
from .._ir.symbolic import (
    Excluded,
    NotSymbolic,
    UsedAsNumber,
    first_difference,
    sizes_of,
    with_sizes,
)


@dataclass(frozen=True, eq=False)
class EarlierProgram:
    """A program for inputs that differ in sizes alone."""

    micro: _capture.Micro
    slots: tuple[Slot, ...]  # slots of its inputs, with the shapes of its last use


def capture(
    request: _capture.Request, earlier: EarlierProgram | None, before: _capture.PythonState | None
) -> _capture.Micro:
    """Trace one micro-batch. If a symbolic size is used as a number, try other sizes.

    ``before``: see ``_capture.capture``.
    """
    try:
        return _capture.capture(request, before)
    except UsedAsNumber:
        for batch in () if earlier is None else _with_other_sizes(request.batch, earlier.slots):
            with contextlib.suppress(Exception):  # it need not run with sizes that no call has
                return _capture.capture(replace(request, batch=batch), before)
        raise


def _with_other_sizes(batch: Sequence[Slot], earlier: Sequence[Slot]) -> Iterator[tuple[Slot, ...]]:
    """Yield inputs with the symbolic sizes of an earlier call, and with those in between."""

    def between(one: int, two: int) -> int:
        return max(one, two) - (abs(one - two) > 1)

    for choose in (lambda _, old: old, between):
        found = tuple(
            replace(
                slot,
                shape=tuple(
                    choose(new, old) if name else new
                    for new, old, name in zip(slot.shape, before.shape, slot.symbols, strict=True)
                ),
            )
            if slot.symbols
            else slot
            for slot, before in zip(batch, earlier, strict=True)
        )
        if min(_sizes(found).values()) >= LEAST:
            yield found


def prove(micro: _capture.Micro, request: _capture.Request, earlier: EarlierProgram | None) -> None:
    """Raise ``NotSymbolic`` if a capture with numbers would have given another graph."""
    assert micro.conditions is not None
    sizes = _sizes(request.batch)
    if not micro.conditions.hold(sizes):
        raise Excluded(f"the sizes {dict(sizes)} do not satisfy {micro.conditions}")
    if _changes_inputs(micro):
        raise NotSymbolic("forward changes its inputs in place")
    unchecked = along_symbols(micro.graph.module.graph)
    if unchecked is not None:
        line = line_of(unchecked)
        where = f" in {source.describe(*line)}" if line else ""
        raise NotSymbolic(f"{name_of(unchecked)}{where} reads indices limited by a symbolic size")
    shapes = [] if earlier is None else [slot.shape for slot in earlier.slots]
    before = sizes_of(request.batch, shapes) if earlier is not None else None
    is_usual = not any(micro.sized)
    if is_usual and earlier is not None and before is not None and micro.conditions.hold(before):
        other, other_sizes = earlier.micro, _sizes(earlier.slots)
    else:
        fixed = tuple(replace(slot, symbols=()) for slot in request.batch)
        before, other_sizes = sizes, {}
        other = _capture.capture(replace(request, batch=fixed, sized=micro.sized))
    found = first_difference(micro.graph, before, other.graph, other_sizes)
    if found is None and not _have_same_values(micro.constants, other.constants):
        found = "the values that forward computes from sizes"
    if found is None and not _have_same_values(micro.host_outputs, other.host_outputs):
        found = "the results that forward does not compute on the device"
    if found is not None:
        raise NotSymbolic(f"forward treats symbolic sizes differently from numbers: {found}")


def for_sizes_of(micro: _capture.Micro, request: _capture.Request) -> _capture.Micro:
    """Return what was captured with the values that nodes have for the sizes of the request."""
    if micro.conditions is None:
        return micro
    return replace(micro, graph=with_sizes(micro.graph, _sizes(request.batch)))


def micro_for_one_size(micro: _capture.Micro, batch: Sequence[Slot]) -> _capture.Micro:
    """Return what was captured, with the sizes of a micro-batch as numbers."""
    if micro.conditions is None:
        return micro
    graph = symbolic.for_one_size(micro.graph, _sizes(batch))
    return replace(micro, graph=graph, conditions=None)


def for_one_size(plan: Plan, batch: Sequence[Slot]) -> Plan:
    """Return a plan in which the sizes of a micro-batch are numbers."""
    program, sizes = plan.program, _sizes(batch)
    if not sizes:
        return plan
    graphs = {
        name: symbolic.for_one_size(graph, sizes) if symbolic.is_symbolic(graph) else graph
        for name, graph in program.graphs.items()
    }
    results = {slot.key: slot for graph in graphs.values() for slot in graph.outputs}
    emit = replace(program.emit, slots=tuple(results[slot.key] for slot in program.emit.slots))
    return replace(plan, program=replace(program, graphs=graphs, body=(*program.body[:-1], emit)))


def _sizes(slots: Sequence[Slot]) -> dict[str, int]:
    sizes = sizes_of(slots, [slot.shape for slot in slots])
    assert sizes is not None
    return sizes


def _changes_inputs(micro: _capture.Micro) -> bool:
    return any(slot in micro.graph.outputs for slot in micro.graph.inputs if not slot.is_state)


def _have_same_values(one: Mapping[Any, torch.Tensor], two: Mapping[Any, torch.Tensor]) -> bool:
    if one.keys() != two.keys():
        return False
    pairs = ((one[key], two[key]) for key in one)
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)
