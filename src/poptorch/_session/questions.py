"""Answer questions of users about a wrapped model without running it: ``describe``, ``explain``,
counters, latency.
"""

from __future__ import annotations

from .. import _capture, _place
from .._ipu_model import shares as dividing
from .._ir.slots import Kind
from .calls import Arguments
from .programs import Task
from .reports import Captures
from .session import Session

Stamps = dict[str, list[list[float]]]
Latency = tuple[float, float, float]
_STAMPED = ("input", "input_complete", "output", "output_complete")


def describe(session: Session) -> list[str]:
    """Say what is compiled, for which inputs, and where the newest weights are."""
    with session.lock():
        if not session.programs.all:
            return ["not compiled"]
        newer = (
            ", its weights are newer than those of the module"
            if session.weights.device.newer
            else ""
        )
        return [
            f"compiled, {session.now.compiled.executable.report().tier}",
            f"inputs: {session.now.inputs}",
            f"device: {'detached' if session.weights.store is None else 'attached'}{newer}",
            "to see the program: print(model.plan()), if model is the wrapped model",
        ]


def explain(session: Session, arguments: Arguments) -> _capture.Explanation:
    """List what a capture for such arguments would refuse or turn into constants."""
    with session.lock():
        request = _task(session, arguments).request
        with session.model.in_mode():
            return _capture.explain(request)


def shares(
    session: Session, arguments: Arguments, chips: int, limit: int | None
) -> list[_place.ChipShare]:
    """Return how to divide the model over this number of chips."""
    with session.lock():
        task = _task(session, arguments)
        with session.model.in_mode():
            return dividing.shares(task.request, task.spec, task.optim, chips, limit)


def _task(session: Session, arguments: Arguments) -> Task:
    bound = session.model.signature.bind(arguments)
    session.weights.fetch()
    return session.model.task(bound, session.settings())


def captures(session: Session, arguments: Arguments) -> Captures:
    """Return what an estimate needs. Weights and arguments may be on the meta device."""
    with session.lock():
        bound = session.model.signature.bind(arguments)
        session.weights.fetch()
        return Captures(session.model, bound)


def counters(session: Session) -> Stamps:
    """Return the time stamps of the last call in seconds, by kind and then by tensor.

    With synthetic data nothing is transferred, so tensors have no stamps.
    """
    with session.lock():
        if session.last is None:
            return {kind: [[]] for kind in _STAMPED}
        now = session.now
        loops, emit = now.spec.loops, now.compiled.plan.program.emit
        travels = now.synthetic is None
        given = [travels * loops.micro_batches for _ in now.inputs.bound.paths]
        returned = [
            travels * emit.count(slot.key, loops)
            for slot in emit.slots
            if slot.kind is not Kind.ANCHOR
        ]
        rows = zip(_STAMPED, session.last[0], (given, given, returned, returned), strict=True)
        return {kind: [[moment] * count for count in counts] for kind, moment, counts in rows}


def latency(session: Session, start: str, end: str) -> Latency:
    """Return (min, max, mean) of the time between two kinds of stamps. The stamps of one kind are
    equal.
    """
    stamps = counters(session)
    times = [stamps[kind][0][0] for kind in (start, end) if stamps[kind] and stamps[kind][0]]
    elapsed = times[1] - times[0] if len(times) == 2 else 0.0
    return elapsed, elapsed, elapsed
