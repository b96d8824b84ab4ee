"""Decide which results of the device iterations a call returns (``OutputMode``), and join them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from .._ir import slots
from .._ir.micro_batches import Lanes
from .._ir.program import Program
from ..enums import OutputMode

ResultMode = tuple[OutputMode, int]  # and the period of EveryN


class ResultModes:
    def __init__(self, program: Program) -> None:
        emit = program.emit
        self.modes: Mapping[str, ResultMode] = {
            slot.key: emit.mode_of(slot.key) for slot in emit.slots
        }
        self.of_lanes = {slot.key for slot in emit.slots if slot.lanes}
        self._loops = program.loops
        self._lanes = program.lanes
        self.sums = {key for key, mode in self.modes.items() if mode[0] is OutputMode.Sum}
        self.of = functools.cache(self._of)

    def _of(self, step: int) -> Mapping[str, list[int]]:
        """Return by key which steps to keep, of a run that begins with this step; indices
        start at 0.
        """
        together = range(self._lanes.steps if self._lanes is not None else 1)
        return {
            key: [at for at in together if self._is(mode, step + at)]
            for key, mode in self.modes.items()
        }

    def _is(self, mode: ResultMode, step: int) -> bool:
        if mode[0] is OutputMode.Final:
            return step == self._loops.steps - 1
        if mode[0] is OutputMode.EveryN:
            return (self._loops.iteration(step) + 1) % mode[1] == 0
        return True


class Collector:
    def __init__(self, program: Program, result_modes: ResultModes) -> None:
        self._lanes = program.lanes
        self._modes = result_modes
        self._kept: dict[str, list[torch.Tensor]] = {key: [] for key in result_modes.modes}
        self._sums: dict[str, dict[int, torch.Tensor]] = {}

    def collect(
        self, keys: Sequence[str], values: Sequence[torch.Tensor], step: int, replica: int
    ) -> None:
        """Keep the required results of a run, or of several runs side by side from ``step`` on."""
        result_modes, lanes = self._modes, self._lanes
        steps = result_modes.of(step)
        for key, value in zip(keys, values, strict=True):
            kept = steps.get(key)
            if not kept:
                continue
            part = value
            if lanes is not None:  # values without lanes belong to a whole update
                part = _steps(value, kept, lanes) if key in result_modes.of_lanes else value[None]
            if key in result_modes.sums:
                self._add(key, part, replica)
            else:
                self._kept[key].append(part)

    def _add(self, key: str, part: torch.Tensor, replica: int) -> None:
        if part.dtype in slots.SMALL_INTEGERS:
            part = part.to(torch.int32)
        if self._lanes is not None and len(part) > 1:
            part = part.view(-1, self._lanes.replicas, *part.shape[1:]).sum(0, dtype=part.dtype)
        sums = self._sums.setdefault(key, {})
        sums[replica] = sums[replica] + part if replica in sums else part
        self._kept[key] = list(sums.values())

    def results(self) -> list[torch.Tensor]:
        """Return one tensor per emitted slot. Scalars are stacked, and others joined along
        dimension 0.
        """
        if self._lanes is None:
            return [p[0] if len(p) == 1 else _joined(p) for p in self._kept.values()]
        return [_joined_lanes(parts) for parts in self._kept.values()]


def _steps(value: torch.Tensor, steps: list[int], lanes: Lanes) -> torch.Tensor:
    if len(steps) == lanes.steps:
        return value
    rows = value.reshape(lanes.steps, lanes.replicas, *value.shape[1:])
    return rows[steps].flatten(0, 1)


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)


def _joined_lanes(parts: list[torch.Tensor]) -> torch.Tensor:
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    if rows.shape[0] == 1:
        return rows.squeeze(0)
    return rows.flatten(0, 1) if rows.dim() > 1 else rows
