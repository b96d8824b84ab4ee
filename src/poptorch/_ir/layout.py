"""Layout: which stage, on which chip, every node and every tensor of a micro graph belongs to.

Stages are numbered in the order in which the forward pass visits them; the backward pass visits
them in reverse. With n stages, ranks 0 to n - 1 are their forward parts and ranks n to 2n - 1 their
backward parts, last stage first, so that values only flow from lower to higher ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from .blocks import Visit
from .graph import Graph
from .placement import Placement


@dataclass(frozen=True)
class Assigned:
    """Where a visit of a block runs.

    Attributes:
        visit: the visit.
        stage: the stage id; in phased strategies the stage's number within its phase.
        phase: the phase that the user named, or None.
        chip: the device.
        by_default: whether nothing named the device, so that it is the stage id.
    """

    visit: Visit
    stage: int
    phase: int | None
    chip: int
    by_default: bool = False


@dataclass(frozen=True)
class Stage:
    """Nodes that run together on one chip.

    Attributes:
        chip: index among the model's own devices.
        blocks: ids of its blocks, in order of their first visit; the part before the first block
            has no id.
        phase: the forward phase it belongs to; None in unphased strategies.
    """

    chip: int
    blocks: tuple[str, ...]
    phase: int | None = None

    @property
    def name(self) -> str:
        """Its blocks, for people."""
        return ", ".join(self.blocks) or "(start)"


@dataclass(frozen=True)
class Spot:
    """Where one node runs."""

    stage: int
    backward: bool = False

    def rank(self, stages: int) -> int:
        """Its place in the order of execution of one micro-batch."""
        return 2 * stages - 1 - self.stage if self.backward else self.stage

    @staticmethod
    def of_rank(rank: int, stages: int) -> Spot:
        """The inverse of ``rank``."""
        return Spot(rank) if rank < stages else Spot(2 * stages - 1 - rank, backward=True)


@dataclass(frozen=True, eq=False)
class Layout:
    """A placed micro graph.

    Attributes:
        graph: the micro graph; never changed, so that its nodes can be keys.
        placement: the user's strategy.
        assigned: the blocks that forward entered, and where they run.
        stages: in forward order; never empty.
        spots: where every operator node runs.
        homes: chips that hold each state tensor, by slot key. Weights have one home; what is only
            read may be copied to several; hyper-parameters and the like are on every chip.
        depth: forward pipeline stages as the strategy's rules count them: device switches + 1.
        chips: devices that one replica needs: highest index + 1.
        reserved: devices that all replicas of this process reserve, rounded if that was allowed.
        replicas: copies of the model in this process.
        training: whether there is a backward pass.
    """

    graph: Graph
    placement: Placement
    assigned: tuple[Assigned, ...]
    stages: tuple[Stage, ...]
    spots: Mapping[fx.Node, Spot]
    homes: Mapping[str, tuple[int, ...]]
    depth: int
    chips: int
    reserved: int
    replicas: int
    training: bool

    @property
    def ranks(self) -> int:
        """Number of forward and backward parts."""
        return len(self.stages) * (2 if self.training else 1)

    def rank(self, node: fx.Node) -> int:
        """The rank of an operator node."""
        return self.spots[node].rank(len(self.stages))

    def chip(self, node: fx.Node) -> int:
        """The chip on which an operator node runs."""
        return self.stages[self.spots[node].stage].chip

    def phase_number(self, spot: Spot) -> int:
        """The internal number of the phase that a spot is in, as logs show it.

        Backward phases go on where the forward ones end, in reverse. They share the last one, or
        leave it and the next free.
        """
        phase = self.stages[spot.stage].phase
        assert phase is not None, "there are no phases in this strategy"
        if spot.backward:
            last = max(stage.phase or 0 for stage in self.stages)
            shared = self.placement.shares_last_phase
            phase = 2 * last - phase + (0 if shared else 2)
        return phase * self.placement.phase_stride
