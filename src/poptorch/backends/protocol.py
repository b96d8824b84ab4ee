"""What a backend is: something that compiles a Plan into an Executable. A public seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from .._ir.plan import Plan
from .._ir.report import Report
from .._ir.state import State

Progress = Callable[[float], None]


@runtime_checkable
class Executable(Protocol):
    """A compiled Plan."""

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
