"""A wrapped model as it is priced: captured for arguments whose values mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .. import _capture, _compile
from .._base import source
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from .._systems import ChipKind, System
from .model import Task
from .signature import Bound

if TYPE_CHECKING:
    from .session import Session


def capture_for_estimate(
    session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[_compile.Capture, Spec]:
    """Capture a wrapped model for arguments of this kind, without compiling it.

    Args:
        session: of the wrapped model, whose weights may be on the meta device.
        args, kwargs: as for ``forward``; they may be, too.

    Returns:
        What was captured, and the settings.
    """
    spec = session._settings()
    return Captures(session, args, kwargs).capture(spec), spec


class Captures:
    """A wrapped model and arguments, captured once for all settings that it is the same for.

    Args:
        session: of the wrapped model, whose weights may be on the meta device.
        args, kwargs: as for ``forward``; they may be, too.
        bound: them, if they are bound already.

    Attributes:
        rows: of the combined batch of this process.
    """

    def __init__(
        self,
        session: Session,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        bound: Bound | None = None,
    ) -> None:
        self._session = session
        self._bound = bound or session.model.signature.bind(args, kwargs or {})
        self.rows = max((t.shape[0] for t in self._bound.tensors if t.dim()), default=1)
        self._made: list[_compile.Capture] = []
        self._again: dict[_compile.Capture, _compile.Capture] = {}
        self._recut: dict[object, _compile.Capture] = {}
        self._thinned: dict[object, _compile.Capture] = {}
        session.fetch()

    def capture(
        self,
        spec: Spec,
        dtype: torch.dtype | None = None,
        kind: ChipKind | None = None,
        chips: int | None = None,
        every: int = 1,
    ) -> _compile.Capture:
        """Return the captured model.

        Args:
            spec: every setting; of those that it was called with before, only loops, locations,
                recomputation and what the capture does not depend on may differ.
            dtype: of its weights, buffers and inputs, where they are floating-point numbers; None
                leaves them.
            kind, chips: what to divide it over; None for its own blocks.
            every: of so many checkpoints the last is one.
        """
        task = self._session.task(self._bound, spec, placeholders=True)
        if dtype is not None:
            task = replace(task, request=_of_type(task.request, dtype))
        captured = self._like(task, spec)
        if kind is not None and chips is not None:
            key = captured, task.optim, spec.training, kind, chips
            if key not in self._recut:
                whole = replace(captured, optim=task.optim)
                self._recut[key] = _compile.recut(whole, spec, kind, chips)
            captured = self._recut[key]
        if every > 1:
            if (captured, every) not in self._thinned:
                made = _compile.with_fewer_checkpoints(captured, every)
                self._thinned[captured, every] = made
            captured = self._thinned[captured, every]
        if spec.training and spec.recompute:
            if captured not in self._again:
                self._again[captured] = _compile.recomputed(captured)
            captured = self._again[captured]
        return replace(captured, optim=task.optim)

    def fitting(self, spec: Spec, system: System, chips: int) -> list[_compile.Share]:
        """Return how to divide the model over chips such that it fits.

        Args:
            spec: every setting.
            system: the chips.
            chips: how many of them one replica has.
        """
        task = self._session.task(self._bound, spec, placeholders=True)
        captured = replace(self._like(task, spec), optim=task.optim)
        return _compile.fitting(captured, spec, system, chips)

    def _like(self, task: Task, spec: Spec) -> _compile.Capture:
        for before in self._made:
            if _same(before.request, task.request, before.micro):
                return before
        with source.excluding(spec.runtime.source_excludes):
            made = _compile.capture_for_estimate(task.request, task.optim, self.rows)
        self._made.append(made)
        return made


def _of_type(request: _capture.Request, dtype: torch.dtype) -> _capture.Request:
    """The same request of a model that ``model.to(dtype)`` would be, with inputs of that type."""

    def changed(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return tuple(replace(s, dtype=dtype) if s.dtype.is_floating_point else s for s in slots)

    batch, make = changed(request.batch), request.examples

    def examples() -> list[torch.Tensor]:
        assert make is not None
        return [each.to(slot.dtype) for each, slot in zip(make(), batch, strict=True)]

    return replace(
        request, state=changed(request.state), batch=batch,
        examples=None if make is None else examples,
    )  # fmt: skip


def _same(before: _capture.Request, now: _capture.Request, micro: _capture.Micro) -> bool:
    """Tell whether a capture stands for another request too."""
    same = (before.batch, before.state, before.grouped) == (now.batch, now.state, now.grouped)
    written = any(slot.kind in (Kind.BUFFER, Kind.CONSTANT) for slot in micro.graph.outputs)
    by_replica = written or micro.exchanging or bool(before.grouped)
    return same and (before.replicas == now.replicas or not by_replica)
