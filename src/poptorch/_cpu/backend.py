"""Provide the backend ``inductor``, which compiles every graph with torch's compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from .._base import private, timing
from .._base.folders import of_torchs_compiler
from .._base.process_settings import keep_freed_memory
from .._ir.graph import Graph
from .._ir.plan import Plan
from .._ir.symbolic import is_symbolic
from .._ops.written_out import written_out
from ..backends.driver import program_report
from ..backends.prepare import without_writes
from ..backends.protocol import Code, Compiled, Executable, Progress
from .compiled_code import generator, load
from .compiler import callable_from_cpp, compile_graph
from .kernel_templates import parsed_when_used
from .prepared import Preparing, copied_only, prepared
from .product_kernels import choosing
from .product_libraries import choices, described_choices
from .toolchain import instructions, obstacle


class Inductor:
    name = "inductor"

    def unavailable(self) -> str | None:
        return obstacle()

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        plan, start, functions = self.prepared(plan), time.perf_counter(), {}
        for done, (name, graph) in enumerate(plan.program.graphs.items(), 1):
            functions[name] = self.build(graph).run
            progress(done / len(plan.program.graphs))
        return self.assemble(plan, functions, time.perf_counter() - start)

    # For the cache of compiled graphs; see ``backends.Builder``.

    def warm(self) -> None:
        with parsed_when_used():
            private.demand(private.COMPILER)

    def build(self, graph: Graph) -> Code:
        """Compile one graph. Because the code is run, its folder must belong to this user alone."""
        with of_torchs_compiler(), _without_torchs_advice():
            with timing.part("import of the compiler"):
                self.warm()
            graph = written_out(graph)
            with timing.part("lowering"), choosing(choices(graph)):
                pure = without_writes(graph)
                slots = graph.inputs if is_symbolic(graph) else ()
                return compile_graph(*pure, graph.examples(), slots)

    def load(self, code: bytes) -> Compiled:
        return load(code)

    def prepared(self, plan: Plan) -> Plan:
        program = prepared(plan.program, callable_from_cpp)
        return plan if program is plan.program else replace(plan, program=program)

    def assemble(self, plan: Plan, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        keep_freed_memory()
        report = program_report(self.name, plan.program, seconds)
        released = sum(slot.bytes for slot, _ in copied_only(plan.program).values())
        report = dataclasses.replace(
            report,
            libraries=described_choices(plan.program.graphs.values()),
            state_bytes=report.state_bytes - released,
        )
        return Preparing(plan, functions, report, in_place=True)

    def conditions(self, graph: Graph) -> Mapping[str, str]:
        chosen = choices(graph, measures=True)
        return {
            "generator": generator(),
            "processor": instructions(),
            "threads": str(torch.get_num_threads()),
            "libraries": ", ".join(f"{shape}: {name}" for shape, name in chosen.items()),
        }


_ADVICE = {  # by the name of the logger
    "torch.utils.cpp_extension": "No CUDA runtime",
    "torch._inductor.ir": "is missing a c-shim implementation",
}


@contextlib.contextmanager
def _without_torchs_advice() -> Iterator[None]:
    """Suppress advice that users cannot follow, while torch's compiler is imported and runs.

    This concerns torch's own deprecations, a missing GPU for a torch that could use one, and
    operators on complex numbers that call eager kernels.
    """
    loggers = [logging.getLogger(name) for name in _ADVICE]

    def can_be_acted_on(record: logging.LogRecord) -> bool:
        return _ADVICE[record.name] not in record.getMessage()

    for logger in loggers:
        logger.addFilter(can_be_acted_on)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", r"`torch\.jit\.", FutureWarning)
            warnings.filterwarnings("ignore", "Torchinductor does not support code .* complex")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(can_be_acted_on)
