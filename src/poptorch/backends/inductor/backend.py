"""The inductor backend: every graph through torch's compiler."""

from __future__ import annotations

import shutil
import time
import warnings

from ..._base import env
from ..._ir.plan import Plan
from ..driver import LoopExecutable, program_report
from ..prepare import prepare
from ..protocol import Executable, Progress


class Inductor:
    """Compiles each graph to native code; the first time takes seconds, later ones hit a cache."""

    name = "inductor"

    def unavailable(self) -> str | None:
        """It needs a C++ compiler."""
        compilers = (env.get("CXX"), "g++", "clang++", "c++")
        if any(name and shutil.which(name) for name in compilers):
            return None
        return "no C++ compiler was found"

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        """Compile every graph."""
        start = time.perf_counter()
        functions = {}
        with warnings.catch_warnings():
            # Torch's own deprecations, met while its compiler is imported and runs.
            warnings.simplefilter("ignore", DeprecationWarning)
            from .compiler import compile_graph

            for done, (name, graph) in enumerate(plan.program.graphs.items(), 1):
                prepared = prepare(graph)
                functions[name] = prepared, compile_graph(prepared.module, graph.zero_inputs())
                progress(done / len(plan.program.graphs))
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        return LoopExecutable(plan, functions, report)
