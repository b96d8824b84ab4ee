"""The inductor backend: every graph through torch's compiler."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping

import torch

from ..._base import env, private
from ..._base.folders import of_the_user
from ..._ir.graph import Graph
from ..._ir.plan import Plan
from ..driver import LoopExecutable, program_report
from ..prepare import prepare
from ..process import keep_freed_memory
from ..protocol import Code, Compiled, Executable, Progress
from .compiler import compile_graph
from .library import generator, load
from .toolchain import instructions, obstacle


class Inductor:
    name = "inductor"

    def unavailable(self) -> str | None:
        return obstacle()

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        start, functions = time.perf_counter(), {}
        for done, (name, graph) in enumerate(plan.program.graphs.items(), 1):
            functions[name] = self.build(graph).run
            progress(done / len(plan.program.graphs))
        return self.assemble(plan, functions, time.perf_counter() - start)

    # For those who keep compiled graphs: see ``backends.Builder``.

    def warm(self) -> None:
        private.demand(private.COMPILER)

    def build(self, graph: Graph) -> Code:
        """Compile one graph; the code is run, so that its folder is this user's alone."""
        caches = env.put_within("TORCHINDUCTOR_CACHE_DIR", str(of_the_user() / "torch"))
        with caches, warnings.catch_warnings():
            # Torch's own deprecations, met while its compiler is imported and runs. Torch 2.12
            # warns, of every product, about kernels for GPUs that it cannot use here.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "CUTLASS backend is not supported")
            private.demand(private.COMPILER)
            return compile_graph(prepare(graph), graph.zero_inputs())

    def load(self, code: bytes) -> Compiled:
        return load(code)

    def assemble(self, plan: Plan, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        keep_freed_memory()
        report = program_report(self.name, plan.program, seconds)
        return LoopExecutable(plan, functions, report, in_place=True)

    def conditions(self) -> Mapping[str, str]:
        return {
            "generator": generator(),
            "processor": instructions(),
            "threads": str(torch.get_num_threads()),
        }
