"""What a call returns: which results of its runs are kept, and how they are put together.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._ir.loops import Lanes
from .._ir.program import Program
from ..enums import OutputMode

Mode = tuple[OutputMode, int]  # with the period of EveryN


class Wanted:
    """Which results of each step the output modes keep: found out once, for all calls.

    Args:
        program: what is run.
        modes: the mode of each emitted slot by its key, in order.
    """

    def __init__(self, program: Program, modes: Mapping[str, Mode]) -> None:
        self.modes = modes
        self._loops = program.loops
        self._lanes = program.lanes
        self._distinct = set(modes.values())
        self._of: dict[int, dict[Mode, list[int]]] = {}

    def of(self, step: int) -> Mapping[Mode, list[int]]:
        """Return, by mode, which of the steps beside this one are kept, counted from it."""
        if step not in self._of:
            side_by_side = range(self._lanes.steps if self._lanes is not None else 1)
            self._of[step] = {
                mode: [at for at in side_by_side if self._is(mode, step + at)]
                for mode in self._distinct
            }
        return self._of[step]

    def _is(self, mode: Mode, step: int) -> bool:
        if mode[0] is OutputMode.Final:
            return step == self._loops.steps - 1
        if mode[0] is OutputMode.EveryN:
            return (self._loops.iteration(step) + 1) % mode[1] == 0
        return True


class Collector:
    """Keeps the results of the runs of a call that are wanted and puts them together.

    Args:
        program: what is run.
        wanted: the results that are kept.
    """

    def __init__(self, program: Program, wanted: Wanted) -> None:
        self._lanes = program.lanes
        self._wanted = wanted
        self._kept: dict[str, list[torch.Tensor]] = {key: [] for key in wanted.modes}
        self._sums: dict[str, dict[int, torch.Tensor]] = {}

    def take(
        self, keys: Sequence[str], values: Sequence[torch.Tensor], step: int, replica: int
    ) -> None:
        """Look at the results of one run.

        Args:
            keys, values: what it returned.
            step: its step; where several run side by side the first of them.
            replica: its replica; 0 where all run side by side.
        """
        steps, modes = self._wanted.of(step), self._wanted.modes
        for key, value in zip(keys, values, strict=True):
            mode = modes.get(key)
            if mode is None or not steps[mode]:
                continue
            lanes = self._lanes
            part = value
            if lanes is not None:  # what has no lanes is of a whole update
                part = _steps(value, steps[mode], lanes) if value.dim() else value[None]
            if mode[0] is OutputMode.Sum:
                self._add(key, part, replica)
            else:
                self._kept[key].append(part)

    def _add(self, key: str, part: torch.Tensor, replica: int) -> None:
        """Sum over everything but replicas."""
        if self._lanes is not None and len(part) > 1:
            part = part.view(-1, self._lanes.replicas, *part.shape[1:]).sum(0, dtype=part.dtype)
        sums = self._sums.setdefault(key, {})
        sums[replica] = sums[replica] + part if replica in sums else part
        self._kept[key] = list(sums.values())

    def results(self) -> list[torch.Tensor]:
        """One tensor per emitted slot: scalars stacked, others joined along dimension 0."""
        joined = _joined if self._lanes is None else _joined_lanes
        return [joined(parts) for parts in self._kept.values()]


def _steps(value: torch.Tensor, steps: list[int], lanes: Lanes) -> torch.Tensor:
    """The lanes of some steps, all replicas of each."""
    if len(steps) == lanes.steps:
        return value
    rows = value.reshape(lanes.steps, lanes.replicas, *value.shape[1:])
    return rows[steps].flatten(0, 1)


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)


def _joined_lanes(parts: list[torch.Tensor]) -> torch.Tensor:
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    if rows.shape[0] == 1:
        return rows.squeeze(0)
    return rows.flatten(0, 1) if rows.dim() > 1 else rows
