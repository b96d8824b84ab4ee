"""The reference backend: runs a graph operator by operator. It defines what programs mean."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import fx

from .._ir.graph import Graph
from .._ir.plan import Plan
from . import stopwatch
from .adam_steps import in_one_pass
from .driver import LoopExecutable, program_report
from .memory_reuse import reuse_memory
from .prepare import accept_strides, prepare, signature
from .protocol import Compiled, Executable, Progress


class Reference:
    """Compiles in no time and needs nothing but torch."""

    name = "reference"
    executable = LoopExecutable

    def unavailable(self) -> str | None:
        """It always works."""
        return None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        """Turn each graph into plain Python calls of ATen operators."""
        start = time.perf_counter()
        functions = {
            name: (signature(graph), self.interpreted(graph))
            for name, graph in plan.program.graphs.items()
        }
        progress(1.0)
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        return self.executable(plan, functions, report)

    def interpreted(self, graph: Graph) -> Compiled:
        """Return a graph's function, from its arguments to what it returns once it is prepared."""
        return self.function(prepare(graph).module)

    @staticmethod
    def function(module: fx.GraphModule) -> Compiled:
        """Return what runs one prepared graph, which is changed."""
        module = accept_strides(reuse_memory(in_one_pass(module)))
        forward = fx.GraphModule(module, module.graph).forward  # not module(...): it has no hooks

        def run(arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return stopwatch.run(module, forward, arguments)  # type: ignore[no-any-return]

        return run
