"""Plan: a Program with its placement. On one device: one chip, one stage, no transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layout import Layout
from .program import Program
from .spec import Spec
from .staged import Staged
from .text import graph_text


@dataclass(frozen=True, eq=False)
class Plan:
    """What a backend compiles.

    Attributes:
        program: the static step.
        spec: every resolved setting.
        per_replica: keys of state that every replica evolves by itself.
        layout: the stages and chips of the user's blocks; None for a program that was not placed.
        staged: the same program cut into parts, each on its chip, where that was asked for.
    """

    program: Program
    spec: Spec
    per_replica: frozenset[str] = field(default_factory=frozenset)
    layout: Layout | None = None
    staged: Staged | None = None

    @property
    def chips(self) -> int:
        """Number of chips that one replica uses."""
        return self.layout.chips if self.layout else 1

    def describe(self) -> str:
        """Return the program and every graph in it, operator by operator."""
        graphs = (graph_text(graph) for graph in self.program.graphs.values())
        return "\n\n".join((str(self.program), *graphs))

    def __str__(self) -> str:
        return str(self.program)
