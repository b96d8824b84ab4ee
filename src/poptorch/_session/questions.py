"""What may be asked about a wrapped model besides running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _capture, _compile
from .._ir.slots import Kind, type_text
from .counters import KEYS, Stamps
from .model import Task
from .pricing import Captures
from .session import Session


def describe(session: Session) -> list[str]:
    """Say what is compiled, for which inputs, and who has the newest weights."""
    with session.lock():
        if not session.programs.all:
            return ["not compiled"]
        bound = session.now.inputs.bound
        inputs = (
            f"{path} {type_text(tensor.dtype, tensor.shape)}"
            for path, tensor in zip(bound.paths, bound.tensors, strict=True)
        )
        newer = ", its weights are newer than the module's" if session.weights.device.newer else ""
        return [
            f"compiled, {session.now.compiled.executable.report().tier}",
            f"inputs: {', '.join(inputs)}",
            f"device: {'detached' if session.weights.store is None else 'attached'}{newer}",
            "print(executor.plan()) shows the program",
        ]


def explain(
    session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _capture.Explanation:
    """List what a capture for arguments of this kind would refuse or freeze."""
    with session.lock():
        request = _task(session, args, kwargs).request
        with session.model.in_mode():
            return _capture.explain(request)


def shares(
    session: Session,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    chips: int,
    limit: int | None,
) -> list[_compile.Share]:
    """Return how to divide the model over so many chips."""
    with session.lock():
        task = _task(session, args, kwargs)
        with session.model.in_mode():
            return _compile.shares(task.request, task.spec, task.optim, chips, limit)


def _task(session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Task:
    bound = session.model.signature.bind(args, kwargs)
    session.weights.fetch()
    return session.model.task(bound, session.settings(), session.freeze)


def captures(session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captures:
    """Return what prices are made of; weights and arguments may be on the meta device."""
    with session.lock():
        bound = session.model.signature.bind(args, kwargs)
        session.weights.fetch()
        return Captures(session.model, session.freeze, bound)


def counters(session: Session) -> Stamps:
    """Return the time stamps of the last call in PopTorch's form.

    With synthetic data nothing travels: tensors have no stamps then.
    """
    with session.lock():
        if session.last is None:
            return {key: [[]] for key in KEYS}
        now = session.now
        loops, emit = now.spec.loops, now.compiled.plan.program.emit
        slots = [slot for slot in emit.slots if slot.kind is not Kind.ANCHOR]
        results, times = [emit.count(slot.key, loops) for slot in slots], loops.micro_batches
        if now.synthetic is not None:
            results, times = [0] * len(results), 0
        return session.last.counters(len(now.inputs.bound.paths), results, times)
