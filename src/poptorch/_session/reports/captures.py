"""Capture a wrapped model for an estimate, with arguments whose values have no meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ... import _capture, _place
from ..._base import source
from ..._ipu_model import estimating, shares
from ..._ipu_model.estimating import CapturedModel
from ..._ipu_systems import ChipKind, System
from ..._ir.slots import EVOLVING, Slot
from ..._ir.spec import Spec
from ..calls import BoundArguments
from ..programs import Model


class Captures:
    """A wrapped model that is captured once for all settings with the same capture.

    Its weights and the arguments may be on the meta device.
    """

    def __init__(self, model: Model, bound: BoundArguments) -> None:
        self._model, self._bound = model, bound
        self.rows = max((t.shape[0] for t in bound.tensors if t.dim()), default=1)
        self._made: list[CapturedModel] = []
        self._changed: dict[object, CapturedModel] = {}

    def capture(
        self,
        spec: Spec,
        dtype: torch.dtype | None = None,
        kind: ChipKind | None = None,
        chips: int | None = None,
        every: int = 1,
    ) -> CapturedModel:
        """Return the captured model.

        Args:
            spec: settings. Those on which the capture depends must be the same in every call. Only
                loops, locations, recomputation and similar settings may differ.
            dtype: the type of floating-point weights, buffers and inputs.
            kind, chips: the chips to divide the model over; None for the model's own blocks.
            every: keep every ``every``-th recomputation checkpoint.
        """
        captured = self._captured(spec, dtype)
        if kind is not None and chips is not None:
            key = captured.optim, spec.training, kind, chips
            captured = self._change(shares.recut, captured, key, spec, kind, chips)
        if every > 1:
            captured = self._change(estimating.with_fewer_checkpoints, captured, every, every)
        return captured

    def fitting(self, spec: Spec, system: System, chips: int) -> list[_place.ChipShare]:
        """Return how to divide the model over this number of chips so that it fits."""
        return shares.fitting(self._captured(spec), spec, system, chips)

    def _captured(self, spec: Spec, dtype: torch.dtype | None = None) -> CapturedModel:
        """Return the capture of the model and optimizer as they are now."""
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
        change: Callable[..., CapturedModel],
        captured: CapturedModel,
        key: object,
        *args: object,
    ) -> CapturedModel:
        """Return a changed capture, which is made once for each change and graph."""
        whole = change, captured.micro.graph, key
        if whole not in self._changed:
            self._changed[whole] = change(captured, *args)
        return replace(self._changed[whole], optim=captured.optim)


def _of_type(request: _capture.Request, dtype: torch.dtype) -> _capture.Request:
    """Return the request for the model after ``model.to(dtype)``, with inputs of that type."""

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
    """Return whether a capture is also valid for another request."""
    same = (before.batch, before.state, before.grouped) == (now.batch, now.state, now.grouped)
    written = any(slot.kind in EVOLVING for slot in micro.graph.outputs)
    by_replica = written or micro.exchanging or bool(before.grouped)
    return same and (before.replicas == now.replicas or not by_replica)
