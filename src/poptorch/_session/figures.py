"""What users ask about a compiled model and its last call (PopTorch user guide, "Features")."""

from __future__ import annotations

from .._ir.slot import Kind
from .arguments import CompiledInputs
from .counters import NONE, Stamps
from .session import Session

CLOCKS = {1: 1.6e9, 2: 1.33e9, 21: 1.85e9}  # cycles per second of the generations


def counters(session: Session) -> Stamps:
    """Return the time stamps of the last call, in PopTorch's form; empty before any."""
    compiled, inputs = session.compiled, session.inputs
    if session.stamps is None or compiled is None or inputs is None:
        return NONE
    if session.spec.target.synthetic_data:
        return NONE
    loops, emit = session.spec.loops, compiled.plan.program.emit
    slots = [slot for slot in emit.slots if slot.kind is not Kind.ANCHOR]
    outputs = [emit.count(slot.key, loops) for slot in slots]
    times = loops.iterations * loops.accumulation * loops.replicas
    return session.stamps.counters(len(inputs.bound.paths), outputs, times)


def cycles(session: Session) -> int | None:
    """Return an estimate of the last call's cycles, or None before any call."""
    if session.stamps is None:
        return None
    _, taken, ready, _ = session.stamps.moments
    return max(1, round((ready - taken) * CLOCKS[session.spec.target.generation or 2]))


def tensor_names(session: Session) -> list[str]:
    """Return the names of the program's tensors, those that can be anchored first."""
    assert session.compiled is not None
    names = list(session.compiled.names)
    if session.seat is not None:
        slots = session.compiled.plan.program.state_slots().values()
        names += [f"UpdatedVar___{slot.path}" for slot in slots if slot.kind is Kind.PARAM]
        names += session.seat.names()
    return names


def compiled_inputs(session: Session) -> CompiledInputs | None:
    """Return the arguments that were compiled for, or None."""
    if session.inputs is None:
        return None
    bound = session.inputs.bound
    given = iter(bound.tensors)
    return CompiledInputs(
        tuple(
            structure.unflatten([next(given) for _ in structure.paths])
            for _, structure in bound.parts
        )
    )
