"""Describe how many micro-batches a call has, and their order in a batch, slowest first.

The order is: device iterations, accumulation steps, groups of replicas with the same input, rows.
Results are returned in the same order, for every replica. A *step*, counted through the call, is
what all replicas do at one accumulation step of one iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..enums import CommGroupType


@dataclass(frozen=True)
class Lanes:
    steps: int  # successive steps in one run, the slower dimension
    replicas: int = 1  # replicas in one run, the faster dimension; always all of them

    @property
    def count(self) -> int:
        return self.steps * self.replicas


@dataclass(frozen=True)
class Loops:
    iterations: int = 1  # device iterations per call; in training, each makes one optimizer update
    accumulation: int = 1  # micro-batches per update and replica; 1 in inference
    replicas: int = 1  # data-parallel copies in this process
    input_group_size: int = 1  # replicas with the same input
    input_group_type: CommGroupType = CommGroupType.Consecutive
    processes: int = 1  # processes of the job; groups of them if several share a replica's stages

    @functools.cached_property  # every call reads it several times
    def steps(self) -> int:
        return self.iterations * self.accumulation

    @functools.cached_property
    def input_groups(self) -> int:
        return self.replicas // self.input_group_size

    @property
    def all_replicas(self) -> int:
        return self.replicas * self.processes

    @functools.cached_property
    def slices(self) -> int:
        return self.steps * self.input_groups

    @property
    def micro_batches(self) -> int:
        return self.steps * self.replicas

    def step(self, iteration: int, accumulated: int) -> int:
        return iteration * self.accumulation + accumulated

    def iteration(self, step: int) -> int:
        return step // self.accumulation

    def input_group(self, replica: int) -> int:
        if self.input_group_type == CommGroupType.Orthogonal:
            return replica % self.input_groups
        return replica // self.input_group_size

    def slice_of(self, step: int, replica: int) -> int:
        return step * self.input_groups + self.input_group(replica)

    def micro_batch(self, step: int, replica: int) -> int:
        return step * self.replicas + replica

    def divides(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape divides into the micro-batches of a call."""
        return not shape or shape[0] % self.slices == 0

    def of_micro_batch(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one slice of a tensor that divides."""
        return (shape[0] // self.slices, *shape[1:]) if shape else ()

    def cuts(self, shapes: Sequence[Sequence[int]], usual: Sequence[Sequence[int]]) -> bool:
        """Return whether a batch has fewer rows than usual, so that micro-batches of the usual size
        are cut from it. If a call has a single micro-batch, the micro-batch becomes smaller.
        """
        return self.micro_batches > 1 and have_fewer_rows(shapes, usual)

    def cut(
        self, batch: Iterable[torch.Tensor], lanes: Lanes | None = None
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Return the slices of combined inputs, or the input of each run if there are lanes."""
        if lanes is None and self.slices == 1:
            return list(zip(batch))
        return [self._cut(value, lanes) for value in batch]

    def _cut(self, value: torch.Tensor, lanes: Lanes | None) -> Sequence[torch.Tensor]:
        shape = (self.slices, value.shape[0] // self.slices, *value.shape[1:])
        slices = value.view(shape)
        if lanes is None:
            return slices.unbind(0)
        if self.input_group_size > 1:
            pairs = (
                (step, replica) for step in range(self.steps) for replica in range(self.replicas)
            )
            slices = slices[[self.slice_of(step, replica) for step, replica in pairs]]
        return slices.reshape(-1, lanes.count, *shape[1:]).unbind(0)

    def __str__(self) -> str:
        groups = "replicas" if self.input_group_size == 1 else "input groups"
        return (
            f"{self.iterations} device iterations x {self.input_groups} {groups} "
            f"x {self.accumulation} accumulation steps"
        )


def have_fewer_rows(shapes: Sequence[Sequence[int]], usual: Sequence[Sequence[int]]) -> bool:
    """Return whether tensors of these shapes have fewer rows than usual, all in proportion."""
    pairs = list(zip(shapes, usual, strict=True))
    if any(len(now) != len(then) for now, then in pairs):
        return False
    rows = [(now[0], then[0]) for now, then in pairs if then]
    return all(now * rows[0][1] == then * rows[0][0] for now, then in rows) and any(
        now < then for now, then in rows
    )
