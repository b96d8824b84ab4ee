"""Manage the compiled code of a plan: what is stored, what is missing, and how it is compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from .._base import log, timing
from .._ir.conditions import Sizes
from .._ir.graph import Graph
from .._ir.plan import Plan
from .._ir.slots import Kind
from .._ir.symbolic import is_symbolic, sizes_of
from .._ops.written_out import written_out
from ..backends import Builder, Compiled, Executable, Progress
from ..backends.reference import Reference
from . import compiler_processes, registry
from .cache import Store, key_of, store_of
from .compiler_processes import CompileJob
from .ranges import Ranges

# Estimated seconds of a compilation on the two cores of the reference machine when no other process
# is running, plus a fixed cost per graph node (8 to 10.5 s for 115 to 175 nodes, 14 for 920, 28 for
# 2050).
STARTING, PER_NODE = 8.0, 0.0095
_REMEMBERED = 1024  # combinations of shapes


class PlanCode:
    def __init__(self, plan: Plan, builder: Builder, store: Store) -> None:
        self.plan, self.builder, self.store = builder.prepared(plan), builder, store
        # Written out as they are compiled, so that cache keys contain the formulas. Graphs that run
        # most often come first.
        self.graphs = {name: written_out(g) for name, g in self.plan.program.graphs.items()}
        self.ranges = {
            name: Ranges(graph, partial(key_of, builder=builder), partial(self._interpreted, name))
            for name, graph in self.graphs.items()
            if is_symbolic(graph)
        }
        keys = ((name, self._key_of(name, graph)) for name, graph in self.graphs.items())
        self.keys = {name: key for name, key in keys if key is not None}
        self._served: set[tuple[torch.Size, ...]] = set()  # shapes of inputs

    @property
    def is_symbolic(self) -> bool:
        return bool(self.ranges)

    def _key_of(self, name: str, graph: Graph) -> str | None:
        ranges = self.ranges.get(name)
        return key_of(graph, self.builder) if ranges is None else ranges.first.key

    def _interpreted(self, name: str) -> Compiled:
        return Reference().interpreted(self.plan.program.graphs[name])

    def announce(self, message: str, *args: object) -> None:
        spec = self.plan.spec
        log.progress(spec.runtime.shows_progress and not spec.process, message, *args)

    def expected_seconds(self) -> float:
        nodes = sum(len(graph.module.graph.nodes) for graph in self.graphs.values())
        return STARTING + PER_NODE * nodes

    def serves(self, batch: Sequence[torch.Tensor]) -> bool:
        """Return whether there is code for the sizes of a batch. If not, some is missing.

        Raises:
            NotSymbolic: there cannot be such code.
        """
        if not self.ranges:
            return True
        shapes = tuple([tensor.shape for tensor in batch])
        if shapes in self._served:
            return True
        sizes = self._sizes(shapes)
        served = [each.serve(sizes) for each in self.ranges.values()]  # each notes what is missing
        if not all(served):
            return False
        if len(self._served) >= _REMEMBERED:
            self._served.clear()
        self._served.add(shapes)
        return True

    def _sizes(self, shapes: Sequence[torch.Size]) -> Sizes:
        """Return the sizes of one micro-batch, by symbol."""
        loops, slots, own = self.plan.program.loops, [], []
        for name in self.ranges:
            for slot in self.graphs[name].inputs:
                if slot.kind is Kind.BATCH and slot.symbols:
                    names = slot.symbols[1:] if slot.lanes else slot.symbols
                    slots.append(replace(slot, symbols=names))
                    own.append(loops.of_micro_batch(shapes[slot.index]))
        sizes = sizes_of(slots, own)
        assert sizes is not None
        return sizes

    def found(self) -> dict[str, Compiled]:
        """Return the code that is already compiled, by the name of its graph."""
        found = ((name, self._find(name, key)) for name, key in self.keys.items())
        return {name: function for name, function in found if function is not None}

    def _find(self, name: str, key: str) -> Compiled | None:
        ranges = self.ranges.get(name)
        if ranges is None:
            return self.store.find(key, self.builder)
        for each in ranges.missing():
            if each.key is not None:
                each.code = self.store.find(each.key, self.builder)
        return ranges if ranges.have_begun else None

    def has_all(self, found: Mapping[str, Compiled]) -> bool:
        """Return whether code was found for all graphs, and for all sizes that occurred."""
        return len(found) == len(self.keys) and not any(map(Ranges.missing, self.ranges.values()))

    def missing(self) -> dict[str, Graph]:
        """Return the graphs whose code is not stored, by the key of the code."""
        return dict(self._missing(self.found()))

    def _missing(self, found: Mapping[str, Compiled]) -> Iterator[tuple[str, Graph]]:
        for name, key in self.keys.items():
            if name in self.ranges:
                missing = self.ranges[name].missing()
                yield from ((each.key, each.graph) for each in missing if each.key is not None)
            elif name not in found:
                yield key, self.graphs[name]

    def mixed(self, found: Mapping[str, Compiled]) -> Executable:
        """Return an executable that interprets the other graphs."""
        others = {n: self._interpreted(n) for n in self.graphs if n not in found}
        return self.builder.assemble(self.plan, {**others, **found}, 0.0)

    def compile_concurrently(self, idle: int) -> None:
        """Let other processes compile, and compile the first graph in this one while they import
        the compiler.
        """
        missing = self.missing()
        own = next(iter(missing), None)
        waits = compiler_processes.is_running(self.builder.name, imported=True)
        others = {key: graph for key, graph in missing.items() if waits or key != own}
        if not others:
            compiler_processes.end_kept()  # it would only slow down the C++ compiler
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
        """Compile what is missing, and return an executable that runs compiled code only."""
        start, functions = time.perf_counter(), dict[str, Compiled]()
        for done, (name, graph) in enumerate(self.graphs.items(), 1):
            with timing.named(f"{name}, graph {done} of {len(self.graphs)}"):
                if name in self.ranges:
                    functions[name] = ranges = self.ranges[name]
                    for each in ranges.missing():
                        each.code = self._build(each.key, each.graph)
                else:
                    functions[name] = self._build(self.keys.get(name), graph)
            progress(done / len(self.graphs))
        return self.builder.assemble(self.plan, functions, time.perf_counter() - start)


def count_of(count: int) -> str:
    return f"{count} graph{'s' * (count > 1)}"


def code_of(plan: Plan) -> dict[str, bytes]:
    """Return the stored code of a plan's graphs, by key."""
    backend = registry.choose(plan.spec.target.backend)
    if not isinstance(backend, Builder):
        return {}
    code = PlanCode(plan, backend, store_of(plan.spec.runtime.cache_dir))
    stored = {key: code.store.read(key) for key in code.keys.values()}
    return {key: code for key, code in stored.items() if code is not None}
