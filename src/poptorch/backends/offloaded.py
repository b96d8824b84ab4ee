"""Run executables on a device with its own memory: state stays there, and inputs and results are
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ir.plan import Plan, Report
from .._ir.program import State
from .._ir.slots import Kind
from .protocol import Executable


class Offloaded:
    def __init__(self, executable: Executable, plan: Plan, device: torch.device) -> None:
        self.device, self._executable = device, executable
        graphs = plan.program.graphs.values()
        slots = [slot for graph in graphs for slot in graph.outputs]
        self._changed = {slot.index for slot in slots if slot.kind is Kind.BATCH}

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        on_device = [value.to(self.device) for value in batch]
        results = self._executable.run(state, on_device)
        for index in self._changed:
            batch[index].copy_(on_device[index])
        return [value.cpu() for value in results]

    def report(self) -> Report:
        return self._executable.report()
