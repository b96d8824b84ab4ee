"""Report: what a program costs, and which of the figures are guesses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Costs of a compiled program.

    Attributes:
        backend: the name of the backend that made it.
        state_bytes: bytes of the tensors that live on the device.
        nodes: operators in each graph, by name.
        compile_seconds: wall time of the backend's compilation.
        next_backend: the one that takes over as soon as it has compiled the program; None for none.
        ready: the graphs that it runs already.
    """

    backend: str
    state_bytes: int
    nodes: tuple[tuple[str, int], ...]
    compile_seconds: float
    next_backend: str | None = None
    ready: tuple[str, ...] = ()

    @property
    def tier(self) -> str:
        """What runs the program now, as a line."""
        if self.next_backend is None:
            return f"runs on the {self.backend} backend"
        part = f", {' and '.join(self.ready)} on {self.next_backend}," if self.ready else ""
        return f"runs on the {self.backend} backend{part} until {self.next_backend} has compiled it"
