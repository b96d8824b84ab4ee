"""What a backend is: something that compiles a Plan into an Executable. A public seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .._ir.graph import Graph
from .._ir.plan import Plan, Report
from .._ir.program import State

Progress = Callable[[float], None]
Compiled = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@runtime_checkable
class Executable(Protocol):
    """A compiled Plan. One whose ``device`` is no CPU gets the state there, the batch from here."""

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do one call of the wrapped model.

        Args:
            state: the device's tensors; updated in place.
            batch: the flat combined inputs; dimension 0 holds every micro-batch, in the order
                iteration, accumulation, input group, sample. One that ``forward`` modifies in
                place is modified here too.

        Returns:
            One tensor per emitted slot, new ones, shaped as the output mode says.
        """
        ...

    def report(self) -> Report:
        """Return what the program costs."""
        ...


# Does a call as the last one was done, in a shorter way; None where something has changed since.
Again = Callable[[State, Sequence[torch.Tensor]], Sequence[torch.Tensor] | None]


def repeating(executable: Executable) -> Again | None:
    """Return how an executable does such calls of a program that writes no state, if it can now."""
    return getattr(executable, "repeating", None)


@dataclass(frozen=True)
class Failure:
    """How a call failed while a graph ran.

    Attributes:
        graph: the name of the graph.
        undone: whether the state and the batch are as before the call.
        exchanged: whether other processes had taken part in the call by then.
    """

    graph: str
    undone: bool
    exchanged: bool


def failure_of(executable: Executable) -> Failure | None:
    """Return how its last call failed; None where no graph did, or where it does not say."""
    return getattr(executable, "failure", None)


def device_of(executable: Executable) -> torch.device:
    """Return where an executable wants the device's tensors: the CPU, if it does not say."""
    return getattr(executable, "device", torch.device("cpu"))


@runtime_checkable
class Backend(Protocol):
    """A way to run Plans. Register one under the entry point group ``poptorch.backends``."""

    name: str

    def unavailable(self) -> str | None:
        """Return why it cannot work on this machine, or None when it can."""
        ...

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        """Compile every graph of a plan, reporting the share done as a number from 0 to 1."""
        ...


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        run: from the prepared graph's arguments to what it returns.
        kept: what ``Builder.load`` makes the function from, or None if nothing can be kept.
    """

    run: Compiled
    kept: bytes | None


@runtime_checkable
class Builder(Protocol):
    """A backend that compiles graph by graph; its graphs are kept and used again by any plan."""

    name: str

    def warm(self) -> None:
        """Import what ``build`` needs, ahead of time."""
        ...

    def build(self, graph: Graph) -> Code:
        """Compile one graph, in any process."""
        ...

    def load(self, code: bytes) -> Compiled:
        """Return the function of a graph that was built before, in little time.

        Raises:
            Exception: it does not work here; the graph is built again then.
        """
        ...

    def prepared(self, plan: Plan) -> Plan:
        """Return a plan with the graphs that ``build`` shall get: the same or equal ones."""
        ...

    def assemble(self, plan: Plan, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        """Return the executable of a plan from the functions of its graphs."""
        ...

    def conditions(self, graph: Graph) -> Mapping[str, str]:
        """Return what a graph's code depends on besides it and the versions of both libraries."""
        ...
