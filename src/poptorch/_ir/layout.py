"""Layout: what placement decides, once per compilation, about a micro graph.

Which pass of which stage a node belongs to stands in its label (``_ir.blocks.Label.stage_pass``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph


@dataclass(frozen=True)
class Stage:
    """Blocks that run together on one chip.

    Attributes:
        chip: index among the model's own devices.
        blocks: ids of its blocks, in order of their first visit; the part before the first block
            has no id.
        phase: the forward phase it belongs to; None in unphased strategies.
    """

    chip: int
    blocks: tuple[str, ...] = ()
    phase: int | None = None

    @property
    def name(self) -> str:
        """Its blocks, for people."""
        return ", ".join(self.blocks) or "(start)"


@dataclass(frozen=True, eq=False)
class Layout:
    """A placed micro graph.

    Attributes:
        stages: in forward order; never empty.
        homes: chips that hold each state tensor, by slot key. Weights have one home; what is only
            read may be copied to several; hyper-parameters and the like are on every chip.
        depth: forward pipeline stages as the strategy's rules count them: device switches + 1.
        chips: devices that one replica needs: highest index + 1.
        reserved: devices that all replicas of this process reserve, rounded if that was allowed.
        graph: the micro graph with its labels.
    """

    stages: tuple[Stage, ...]
    homes: Mapping[str, tuple[int, ...]]
    depth: int
    chips: int
    reserved: int
    graph: Graph = field(metadata={"saved": False})
