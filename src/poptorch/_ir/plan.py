"""Plan: a Program with its placement. On one device: one chip, one stage, no transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._base import html
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
        layout: the stages and chips of the user's blocks.
        staged: the same program cut into the passes of its stages, where that was asked for.
        tier: what runs it at the moment, as a line; empty where nothing does.
    """

    program: Program
    spec: Spec
    layout: Layout
    staged: Staged | None = field(default=None, metadata={"saved": False})
    tier: str = field(default="", metadata={"saved": False})

    def describe(self) -> str:
        """Return the program and every graph in it, operator by operator."""
        graphs = (graph_text(graph) for graph in self.program.graphs.values())
        return "\n\n".join((str(self.program), *graphs))

    def __str__(self) -> str:
        from .plan_text import plan_text

        return plan_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it where a notebook shows text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show it in a notebook, the schedule as a picture."""
        pictures = [] if self.staged is None else [self.staged.schedule.to_svg()]
        return "".join([html.text_block(str(self)), *pictures])
