"""Compile the graphs of a plan one by one, or find their code in the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .._base import log, timing
from .._ir.graph import Graph
from .._ir.plan import Plan
from .._ir.symbolic import is_symbolic
from .._ops.written_out import written_out
from ..backends import Builder, Compiled, Executable, Progress
from ..backends.reference import Reference
from . import helper
from .cache import Store, key_of
from .helper import CompileJob

# Estimated seconds of a compilation on the two cores of the reference machine when no other process
# is running, plus a fixed cost per graph node (8 to 10.5 s for 115 to 175 nodes, 14 for 920, 28 for
# 2050).
STARTING, PER_NODE = 8.0, 0.0095


class PlanCode:
    def __init__(self, plan: Plan, builder: Builder, store: Store) -> None:
        self.plan, self.builder, self.store = builder.prepared(plan), builder, store
        # Written out as they are compiled, so that cache keys contain the formulas. Graphs that run
        # most often come first.
        self.graphs = {name: written_out(g) for name, g in self.plan.program.graphs.items()}
        keys = ((name, key_of(graph, builder)) for name, graph in self.graphs.items())
        self.keys = {name: key for name, key in keys if key is not None}

    @property
    def is_symbolic(self) -> bool:
        return any(map(is_symbolic, self.graphs.values()))

    def announce(self, message: str, *args: object) -> None:
        spec = self.plan.spec
        log.progress(spec.runtime.shows_progress and not spec.process, message, *args)

    def expected_seconds(self) -> float:
        nodes = sum(len(graph.module.graph.nodes) for graph in self.graphs.values())
        return STARTING + PER_NODE * nodes

    def found(self) -> dict[str, Compiled]:
        found = ((name, self.store.find(key, self.builder)) for name, key in self.keys.items())
        return {name: function for name, function in found if function is not None}

    def missing(self) -> dict[str, Graph]:
        found = self.found()
        return {key: self.graphs[name] for name, key in self.keys.items() if name not in found}

    def mixed(self, found: Mapping[str, Compiled]) -> Executable:
        graphs = self.plan.program.graphs.items()
        others = {n: Reference().interpreted(g) for n, g in graphs if n not in found}
        return self.builder.assemble(self.plan, {**others, **found}, 0.0)

    def compile_concurrently(self, idle: int) -> None:
        """Let other processes compile, and compile the first graph in this one while they import
        the compiler.
        """
        missing = self.missing()
        own = next(iter(missing), None)
        waits = helper.is_there(self.builder.name, imported=True)
        others = {key: graph for key, graph in missing.items() if waits or key != own}
        if not others:
            helper.end_kept()  # it would only slow down the C++ compiler
            return
        job = CompileJob(others, self.builder.name, self.store, idle + 1 if waits else idle)
        try:
            if own is not None and not waits:
                self._build(own, missing[own])
            with timing.named(count_of(len(others))), timing.part("waiting for another process"):
                job.wait()
        finally:
            job.end()

    def _build(self, key: str | None, graph: Graph) -> Compiled:
        if key is None:
            return self.builder.build(graph).run
        return self.store.function(key, graph, self.builder)

    def compile(self, progress: Progress) -> Executable:
        start, functions = time.perf_counter(), dict[str, Compiled]()
        for done, (name, graph) in enumerate(self.graphs.items(), 1):
            with timing.named(f"{name}, graph {done} of {len(self.graphs)}"):
                functions[name] = self._build(self.keys.get(name), graph)
            progress(done / len(self.graphs))
        return self.builder.assemble(self.plan, functions, time.perf_counter() - start)


def count_of(count: int) -> str:
    return f"{count} graph{'s' * (count > 1)}"
