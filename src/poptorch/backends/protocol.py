"""Define the interface of backends, which compile a Plan to an Executable. Other packages may
implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .._ir.conditions import ALWAYS, Conditions
from .._ir.graph import Graph
from .._ir.plan import Plan, Report
from .._ir.program import State

Progress = Callable[[float], None]
Compiled = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@runtime_checkable
class Executable(Protocol):
    """A compiled Plan. If its ``device`` is not a CPU, it gets the state on that device, and the
    batch on the host.
    """

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Make one call of the wrapped model.

        A signal handler may raise anywhere in the call of a program that changes nothing.

        Args:
            state: the device's tensors, which are updated in place.
            batch: the flat combined inputs. Dimension 0 contains all micro-batches in the order
                iteration, accumulation, input group, sample. If ``forward`` modifies an input in
                place, it is modified here, too.

        Returns:
            One new tensor per emitted slot, with the shape for the output mode.
        """
        ...

    def report(self) -> Report:
        """Return what the program costs."""
        ...


def conditions_of(compiled: Compiled) -> Conditions:
    """Return what sizes must satisfy so that the code of a graph may be called with them."""
    return getattr(compiled, "conditions", ALWAYS)


def unsuitable(executable: Executable) -> str | None:
    """Return why a program for all sizes cannot be compiled, as soon as that is known."""
    return getattr(executable, "unsuitable", None)


def finder_of_shortcuts(executable: Executable) -> Callable[[State], Compiled | None] | None:
    """Return a function that finds a shortcut of a call, or None if there is none at present.

    A shortcut does for a batch what ``run`` does, in less time. It may be called until weights
    change or are released (``State.writes``), unless the call is timed in parts. If it fails,
    nothing has changed, and ``run`` has to make the call.
    """
    return getattr(executable, "shortcut", None)


@dataclass(frozen=True)
class Failure:
    """How a call failed while a graph ran.

    Attributes:
        graph: the name of the graph.
        undone: whether the state and the batch are as before the call.
        exchanged: whether other processes had already taken part in the call.
    """

    graph: str
    undone: bool
    exchanged: bool


def failure_of(executable: Executable) -> Failure | None:
    """Return how the last call failed; None if no graph failed or the executable does not say."""
    return getattr(executable, "failure", None)


def device_of(executable: Executable) -> torch.device:
    """Return the device for the executable's tensors; the CPU if it does not say."""
    return getattr(executable, "device", torch.device("cpu"))


@runtime_checkable
class Backend(Protocol):
    """A way to run Plans. Register it under the entry point group ``poptorch.backends``."""

    name: str

    def unavailable(self) -> str | None:
        """Return why the backend cannot work on this machine, or None if it can."""
        ...

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        """Compile every graph of a plan, and report the progress as a number from 0 to 1."""
        ...


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        run: maps the arguments of the prepared graph to its results.
        kept: what ``Builder.load`` makes the function from, or None if it cannot be stored.
    """

    run: Compiled
    kept: bytes | None


@runtime_checkable
class Builder(Protocol):
    """A backend that compiles graph by graph. Its compiled graphs are cached and can be used by any
    plan.
    """

    name: str

    def warm(self) -> None:
        """Import what ``build`` needs, ahead of time."""
        ...

    def build(self, graph: Graph) -> Code:
        """Compile one graph, in any process."""
        ...

    def load(self, code: bytes) -> Compiled:
        """Return the function of a graph that was compiled before, in little time.

        Raises:
            Exception: it does not work here. The graph is then compiled again.
        """
        ...

    def prepared(self, plan: Plan) -> Plan:
        """Return a plan with the graphs that ``build`` will get: the same or equivalent ones."""
        ...

    def assemble(self, plan: Plan, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        """Return the executable of a plan from the functions of its graphs."""
        ...

    def conditions(self, graph: Graph) -> Mapping[str, str]:
        """Return what a graph's code depends on, in addition to the graph and the versions of both
        libraries.
        """
        ...
