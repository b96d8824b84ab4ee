"""Plan: a Program with its placement. On one device: one chip, one stage, no transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

from .program import Program
from .spec import Spec
from .text import graph_text


@dataclass(frozen=True, eq=False)
class Plan:
    """What a backend compiles.

    Attributes:
        program: the static step.
        spec: every resolved setting.
        chips: number of chips that one replica uses.
        per_replica: keys of state that every replica evolves by itself.
    """

    program: Program
    spec: Spec
    chips: int = 1
    per_replica: frozenset[str] = field(default_factory=frozenset)

    def describe(self) -> str:
        """Return the program and every graph in it, operator by operator."""
        graphs = (graph_text(graph) for graph in self.program.graphs.values())
        return "\n\n".join((str(self.program), *graphs))

    def __str__(self) -> str:
        return str(self.program)
