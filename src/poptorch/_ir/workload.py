"""Workload: what a schedule has to get done, whatever its order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .layout import Stage
from .schedule import Action, Traffic
from .stage_pass import StagePass, stage_passes

Keys = Mapping[StagePass, tuple[str, ...]]


@dataclass(frozen=True)
class Streaming:
    """Tensors between chip and streaming memory, by slot key.

    Attributes:
        loads: brought to the chip before a pass.
        stores: taken off the chip after a pass.
        drops: forgotten on the chip after a pass; streaming memory still has them.
    """

    loads: Keys = field(default_factory=dict)
    stores: Keys = field(default_factory=dict)
    drops: Keys = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """What a schedule has to get done: for one update in training, for one call in inference.

    Attributes:
        stages: of the model, in forward order.
        micro_batches: how many.
        training: whether stages have backward passes.
        needs: passes whose results a pass reads, of the same micro-batch.
        updates: the passes of the update, in order.
        streaming: what passes load from streaming memory and store there.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    training: bool
    needs: Mapping[StagePass, frozenset[StagePass]] = field(default_factory=dict)
    updates: tuple[StagePass, ...] = ()
    streaming: Streaming = field(default_factory=Streaming)

    @property
    def passes(self) -> list[StagePass]:
        """The passes of one micro-batch, in order."""
        return stage_passes(len(self.stages), self.training)

    def chip_of(self, stage_pass: StagePass) -> int:
        """The chip on which a pass runs."""
        return stage_pass.stage if stage_pass.is_update else self.stages[stage_pass.stage].chip

    @property
    def chips(self) -> list[int]:
        """Every chip that has something to do."""
        return sorted({self.chip_of(each) for each in (*self.passes, *self.updates)})

    @functools.cached_property
    def fetches(self) -> Mapping[StagePass, list[StagePass]]:
        """Passes whose stores the load of a pass brings back, by the pass that loads.

        Of the same micro-batch where they come earlier, of the one before where they do not.
        """
        return {loading: list(self._stored_for(loading)) for loading in self.streaming.loads}

    def _stored_for(self, loading: StagePass) -> Iterator[StagePass]:
        wanted = set(self.streaming.loads[loading])
        for storing, keys in self.streaming.stores.items():
            same_chip = self.chip_of(storing) == self.chip_of(loading)
            # What the update stores is for the next time around; but rounds follow one another.
            too_late = storing.is_update and (not loading.is_update or loading <= storing)
            if same_chip and wanted.intersection(keys) and not too_late:
                yield storing

    def with_traffic(self, stage_pass: StagePass, micro_batch: int = 0) -> list[Action]:
        """Return the actions of a pass: loading, computing, storing."""
        actions = [Action(stage_pass, micro_batch)]
        if stage_pass in self.streaming.loads:
            actions.insert(0, Action(stage_pass, micro_batch, Traffic.LOAD))
        if stage_pass in self.streaming.stores:
            actions.append(Action(stage_pass, micro_batch, Traffic.STORE))
        return actions

    def actions(self) -> Iterator[Action]:
        """Yield everything that has to be done, once."""
        for micro_batch in range(self.micro_batches):
            for each in self.passes:
                yield from self.with_traffic(each, micro_batch)
        for each in self.updates:
            yield from self.with_traffic(each)
