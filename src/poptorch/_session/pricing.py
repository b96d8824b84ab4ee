"""A wrapped model as it is priced: captured for arguments whose values mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .. import _capture, _place
from .._base import source
from .._ipu_model import estimating, shares
from .._ipu_model.estimating import Capture
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from .._systems import ChipKind, System
from .model import Model
from .signature import Bound


class Captures:
    """A wrapped model, captured once for all settings that it is the same for.

    Its weights and the arguments may be on the meta device.
    """

    def __init__(self, model: Model, bound: Bound) -> None:
        self._model, self._bound = model, bound
        self.rows = max((t.shape[0] for t in bound.tensors if t.dim()), default=1)
        self._made: list[Capture] = []
        self._changed: dict[object, Capture] = {}

    def capture(
        self,
        spec: Spec,
        dtype: torch.dtype | None = None,
        kind: ChipKind | None = None,
        chips: int | None = None,
        every: int = 1,
    ) -> Capture:
        """Return the captured model.

        Args:
            spec: of the settings that it was called with before, only loops, locations,
                recomputation and what the capture does not depend on may differ.
            dtype: of its weights, buffers and inputs, where they are floating-point numbers.
            kind, chips: what to divide it over; None for its own blocks.
        """
        captured = self._captured(spec, dtype)
        if kind is not None and chips is not None:
            key = captured.optim, spec.training, kind, chips
            captured = self._change(shares.recut, captured, key, spec, kind, chips)
        if every > 1:
            captured = self._change(estimating.with_fewer_checkpoints, captured, every, every)
        if spec.training and spec.recompute:
            captured = self._change(estimating.recomputed, captured, None)
        return captured

    def fitting(self, spec: Spec, system: System, chips: int) -> list[_place.Share]:
        """Return how to divide the model over so many chips of a system such that it fits."""
        return shares.fitting(self._captured(spec), spec, system, chips)

    def _captured(self, spec: Spec, dtype: torch.dtype | None = None) -> Capture:
        """The model as it is, for an optimizer as it is now."""
        task = self._model.task(self._bound, spec, placeholders=True)
        request = task.request if dtype is None else _of_type(task.request, dtype)
        for before in self._made:
            if _same(before.request, request, before.micro):
                return replace(before, optim=task.optim)
        with source.excluding(spec.runtime.source_excludes), self._model.in_mode():
            made = estimating.capture_for_estimate(request, task.optim, self.rows)
        self._made.append(made)
        return made

    def _change(
        self,
        change: Callable[..., Capture],
        captured: Capture,
        key: object,
        *args: object,
    ) -> Capture:
        """A changed capture, made once: its graph says which it is a change of."""
        whole = change, captured.micro.graph, key
        if whole not in self._changed:
            self._changed[whole] = change(captured, *args)
        return replace(self._changed[whole], optim=captured.optim)


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
