"""Run a program in two tiers: the reference backend runs immediately, and compiled code replaces it
when it is ready.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .._base import interrupts, log, source, timing
from .._base.errors import described
from .._base.resources import IDLE, Cores
from .._ir.blocks import line_of
from .._ir.graph import Graph
from .._ir.plan import Plan, Report
from .._ir.program import State
from .._ir.symbolic import NotSymbolic, is_symbolic
from .._ops.written_out import written_out
from ..backends import Backend, Builder, Compiled, Executable, Progress
from ..backends.reference import Reference
from . import helper, registry
from .cache import Store, key_of, store_of
from .fallback import WithFallback, warn_of_failure
from .helper import CompileJob

# Estimated seconds of a compilation on the two cores of the reference machine when no other process
# is running, plus a fixed cost per graph node (8 to 10.5 s for 115 to 175 nodes, 14 for 920, 28 for
# 2050); and the factor while a run uses the machine, too. The other cores can take over half of the
# work.
STARTING, PER_NODE, BESIDE, SHARE = 8.0, 0.0095, 1.2, 0.5
SOONER = 2.5  # seconds less if the waiting process compiles, because no process must be started
COMPARED = 10  # calls of the fast tier before its speed is reported
LOOKING = 0.5  # seconds between two checks of the cache
_NOT_COMPILED = "the compiler needs the numbers: {}"
PATIENCE = 30.0  # seconds to wait for a free core, and between two log lines


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

    def tell(self, message: str, *args: object) -> None:
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
            with timing.named(_graphs(len(others))), timing.part("waiting for another process"):
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


def _graphs(count: int) -> str:
    return f"{count} graph{'s' * (count > 1)}"


def code_of(plan: Plan) -> dict[str, bytes]:
    backend = registry.choose(plan.spec.target.backend)
    if not isinstance(backend, Builder):
        return {}
    code = PlanCode(plan, backend, store_of(plan.spec.runtime.cache_dir))
    stored = {key: code.store.read(key) for key in code.keys.values()}
    return {key: code for key, code in stored.items() if code is not None}


_cores = Cores()
_cores.idle()  # measured from now on


def prepare(backend: Backend, store: Store) -> int:
    """Let an idle core import the compiler while the model is captured, if the compiler will be
    needed.
    """
    idle = _cores.idle()
    if not isinstance(backend, Builder) or not store.is_empty():
        return 0
    if idle < IDLE and not helper.is_there(backend.name):
        return 0
    try:
        helper.warm(backend.name)
    except OSError as error:  # compiling will have the same problem, and report it
        log.engine.debug("The second process for compiling could not start: %s", error)
        return 0
    return max(1, int(idle))


def compile_plan(
    backend: Backend, plan: Plan, store: Store, background: bool, progress: Progress, idle: int
) -> Executable:
    if not isinstance(backend, Builder):
        return backend.compile(plan, progress)
    reference = Reference()
    if (line := _users_generator(plan)) is not None:
        log.engine.warning(
            (
                "The program is interpreted, because it draws from a generator of the model at "
                "%s. To use compiled code, draw without generator=; options.randomSeed sets the "
                "seed of the program"
            ),
            line,
        )
        return reference.compile(plan, progress)
    code = PlanCode(plan, backend, store)
    can_be_kept = len(code.keys) == len(code.graphs)
    is_missing = not can_be_kept or bool(code.missing())
    if background and can_be_kept and is_missing:
        return Tiered(reference.compile(plan, progress), code, idle)
    if is_missing:
        code.tell("captured; compiling takes about %.0f s", code.expected_seconds() - SOONER)
    try:
        if is_missing and idle:
            code.compile_concurrently(idle)
        fast = code.compile(progress)
        return WithFallback(fast, lambda: reference.compile(plan, lambda share: None), code.plan)
    except Exception as error:  # after any error, the results of the reference backend are right
        if code.is_symbolic:
            raise NotSymbolic(_NOT_COMPILED.format(described(error))) from None
        log.engine.warning(
            "Compilation failed. The program runs on the %s backend: %s",
            reference.name,
            described(error),
        )
        return reference.compile(plan, progress)


def _users_generator(plan: Plan) -> str | None:
    """Return the line that draws from a generator of the user's, which compiled code does
    not support.
    """
    for graph in plan.program.graphs.values():
        for node in graph.generators:
            line = next(filter(None, map(line_of, node.users)), None)
            return source.describe(*line) if line else "an unknown line"
    return None


class Tiered:
    """Runs a plan on the slow tier until the fast one is ready, graph by graph.

    If no core is idle, compiling starts when the slow tier has taken about as long as compiling
    will take, because the number of future calls is unknown.
    """

    def __init__(self, slow: Executable, code: PlanCode, idle: int) -> None:
        self._current = self._slow_tier = slow
        self._code, self._tell = code, code.tell
        self._job: CompileJob | None = None
        self._ready: list[str] = []  # compiled graphs, while others are still being compiled
        self._idle = idle
        self._expected = code.expected_seconds()
        self._next_look = 0.0
        self._cores = Cores()
        self._cores.idle()
        self._calls, self._spent = 0, 0.0  # of the slow tier
        self._slow = deque[float](maxlen=4 * COMPARED)  # seconds of its latest calls
        self._fast: list[float] | None = None  # seconds of the first calls of the fast tier
        self._waits_since: float | None = None  # since when it has waited for a free core
        # when the compilation started, and when a log line last reported on it
        self._begun = self._told = 0.0
        self.unsuitable: str | None = None  # why programs of one size are better
        self.waiting = True

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.waiting and self._fast is None:
            return self._current.run(state, batch)
        with interrupts.deferred():
            return self._timed(state, batch)

    def _timed(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run, measure how long this took, and use compiled code if it is ready."""
        start = time.perf_counter()
        if self.waiting:
            self._look(start)
        results = self._current.run(state, batch)
        seconds = time.perf_counter() - start
        if isinstance(self._current, WithFallback) and self._current.gave_up:
            self._finish()
            self._fast = None
        if self._fast is not None:
            self._compare(seconds)
        else:
            self._calls += 1
            self._spent += seconds
            if not self._ready:
                self._slow.append(seconds)
        return results

    def report(self) -> Report:
        if not self.waiting:
            return self._current.report()
        then = self._code.builder.name
        return replace(self._slow_tier.report(), next_backend=then, ready=tuple(self._ready))

    def _look(self, now: float) -> None:
        try:
            if self._job is None:
                self._begin(now)
            elif now - self._told >= PATIENCE:
                self._told = now
                done, all_of_them = len(self._job.outcomes), len(self._job.keys)
                seconds = now - self._begun
                text = "still compiling after %.0f s, %d of %s done; calls run interpreted"
                self._tell(text, seconds, done, _graphs(all_of_them))
            news = self._job is not None and self._job.look()
            if news or (self._slow and now >= self._next_look):
                self._next_look = now + LOOKING
                self._take_over()
        except Exception as error:  # after any error, the results of the slow tier are right
            self._give_up(described(error))

    def _begin(self, now: float) -> None:
        idle = self._idle or int(self._cores.idle() + 1 - IDLE)
        pays = self._spent >= SHARE * self._expected
        if self._waits_since is None:
            self._waits_since = now
            if not idle and not pays:
                waiting = "compiling waits for a free core, at most %.0f s"
                self._tell(f"captured; calls run interpreted, and {waiting}", PATIENCE)
        in_vain = not idle and not pays
        if in_vain and now - self._waits_since < PATIENCE:
            return
        missing = self._code.missing()
        if not missing:  # another process has just stored the last one
            return
        name, store = self._code.builder.name, self._code.store
        self._job = CompileJob(missing, name, store, max(1, idle), is_nice=in_vain)
        self._begun = self._told = now
        verb = f"{_graphs(len(missing))} compile{'s' * (len(missing) == 1)}"
        if in_vain:
            text = "no core is free; calls run interpreted while %s at low priority"
            self._tell(text, verb)
        else:
            text = "captured; calls run interpreted while %s, about %.0f s"
            self._tell(text, verb, BESIDE * self._expected)

    def _take_over(self) -> None:
        found = self._code.found()
        complete = len(found) == len(self._code.keys)
        if not complete and self._job is not None and self._job.finished:
            outcomes = self._job.outcomes.values()
            failures = [why for outcome, why in outcomes if outcome == helper.FAILED]
            if failures:
                self._give_up(failures[0])
                return
            complete = True  # soon, because this process compiles the others
        if complete:
            # Signals are delayed while state is written, and nothing has been written yet in this
            # call.
            with interrupts.allowed(), interrupts.insisting():
                self._current = self._with_fallback(self._code.compile(lambda share: None))
            self._finish()
            self._fast = []
        elif len(found) > len(self._ready):
            self._current = self._with_fallback(self._code.mixed(found))
            self._ready = [*found]
            text = "%d of %d graphs compiled: %s, from call %d on"
            names = " and ".join(found)
            self._tell(text, len(found), len(self._code.keys), names, self._calls + 1)

    def _with_fallback(self, fast: Executable) -> WithFallback:
        return WithFallback(fast, lambda: self._slow_tier, self._code.plan)

    def _compare(self, seconds: float) -> None:
        assert self._fast is not None
        self._fast.append(seconds)
        if len(self._fast) < COMPARED:
            return
        slow, fast = statistics.median(self._slow), statistics.median(self._fast)
        self._tell(
            "full speed from call %d on: %.1f times as fast, %.2f ms per call instead of %.2f ms",
            self._calls + 1,
            slow / fast,
            fast * 1e3,
            slow * 1e3,
        )
        self._fast = None

    def _give_up(self, why: str) -> None:
        self._finish()
        if self._code.is_symbolic:
            self.unsuitable = _NOT_COMPILED.format(why)
        else:
            warn_of_failure(why)

    def _finish(self) -> None:
        self.waiting = False
        if self._job is not None:
            self._job.end()
            self._job = None
