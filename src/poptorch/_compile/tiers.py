"""Run a program in two tiers: the reference backend runs immediately. Decides when compiling
begins, and when compiled code takes over.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .._base import interrupts, log, source
from .._base.errors import described
from .._base.resources import IDLE, Cores
from .._ir.block_labels import line_of
from .._ir.plan import Plan, Report
from .._ir.program import State
from .._ir.symbolic import NotSymbolic
from ..backends import Backend, Builder, Compiled, Executable, Progress
from ..backends.protocol import finder_of_shortcuts
from ..backends.reference import Reference
from . import compiler_processes, runtime_choice
from .cache import Store
from .compiler_processes import CompileJob
from .fallback import WithFallback, warn_of_failure
from .plan_code import PlanCode, count_of

# The factor on the estimated seconds of a compilation while a run uses the machine, too. The other
# cores can take over half of the work.
WHILE_RUNNING, SHARE = 1.2, 0.5
# seconds less if the waiting process compiles, because no process must be started
SAVED_SECONDS = 2.5
COMPARED = 10  # calls of the fast tier before its speed is reported
POLL_SECONDS = 0.5  # seconds between two checks of the cache
_NOT_COMPILED = "the compiler needs numbers instead of symbolic sizes: {}"
PATIENCE = 30.0  # seconds to wait for a free core, and between two log lines


_cores = Cores()
_cores.idle()  # measured from now on


def prepare(backend: Backend, store: Store) -> int:
    """Let an idle core import the compiler while the model is captured, if the compiler will be
    needed.
    """
    idle = _cores.idle()
    if not isinstance(backend, Builder) or not store.is_empty():
        return 0
    if idle < IDLE and not compiler_processes.is_running(backend.name):
        return 0
    try:
        compiler_processes.warm(backend.name)
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

    def interpreted() -> Executable:
        return reference.compile(plan, lambda share: None)

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
    if background and can_be_kept and (is_missing or code.ranges):
        tiered = Tiered(interpreted, code, idle)
        progress(1.0)
        return runtime_choice.considering(tiered, plan, code)
    if is_missing:
        code.announce(
            "captured; compiling takes about %.0f s", code.expected_seconds() - SAVED_SECONDS
        )
    try:
        if is_missing and idle:
            code.compile_concurrently(idle)
        fast = WithFallback(code.compile(progress), interpreted, code.plan)
        if code.ranges:
            return OnDemand(fast, interpreted, code)
        return runtime_choice.considering(fast, plan, code)
    except Exception as error:  # after any error, the results of the reference backend are right
        if code.ranges:
            raise NotSymbolic(_NOT_COMPILED.format(described(error))) from None
        log.engine.warning(
            "Compilation failed. The program runs on the %s backend: %s",
            reference.name,
            described(error),
        )
        return reference.compile(plan, progress)


def _users_generator(plan: Plan) -> str | None:
    """Return the line that draws from one of the user's generators, which compiled code does
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

    def __init__(self, slow: Callable[[], Executable], code: PlanCode, idle: int) -> None:
        self._slow_tier = functools.cache(slow)
        self._code, self._announce = code, code.announce
        self._job: CompileJob | None = None
        self._ready: list[str] = []  # compiled graphs, while others are still being compiled
        self._idle = idle
        self._expected = code.expected_seconds()
        self._next_poll = 0.0
        self._cores = Cores()
        self._cores.idle()
        self._calls, self._spent = 0, 0.0  # calls of the slow tier, and their seconds
        self._slow = deque[float](maxlen=4 * COMPARED)  # seconds of its latest calls
        self._fast: list[float] | None = None  # seconds of the first calls of the fast tier
        self._waits_since: float | None = None  # since when it has waited for a free core
        # when the compilation started, and when a log line last reported on it
        self._begun = self._last_report = 0.0
        self.unsuitable: str | None = None  # why programs of one size are better
        self.waiting = bool(code.missing())
        self._current = self._slow_tier() if self.waiting else self._compiled()

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        has_taken_over = not self.waiting and self._fast is None
        if has_taken_over and (not self._code.ranges or self._serves(batch)):
            return self._current.run(state, batch)
        with interrupts.deferred():
            return self._timed(state, batch)

    @property
    def shortcut(self) -> Callable[[State], Compiled | None] | None:
        """The shortcut of compiled code, once that has taken over for all sizes."""
        is_timed = self.waiting or self._fast is not None
        return None if is_timed or self._code.ranges else finder_of_shortcuts(self._current)

    def _serves(self, batch: Sequence[torch.Tensor]) -> bool:
        """Return whether compiled code has taken over for these sizes, or never will."""
        if not self._code.ranges or self._has_given_up:
            return True
        try:
            return self._code.serves(batch)
        except NotSymbolic as error:
            self.unsuitable = str(error)
            return True

    @property
    def _has_given_up(self) -> bool:
        current = self._current
        return (
            self.unsuitable is not None or not isinstance(current, WithFallback) or current.gave_up
        )

    def _timed(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run, measure how long this took, and use compiled code if it is ready."""
        start = time.perf_counter()
        if not self.waiting and not self._serves(batch):
            self._wait_again()
        if self.waiting:
            self._poll(start)
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
        return replace(self._slow_tier().report(), next_backend=then, ready=tuple(self._ready))

    def _wait_again(self) -> None:
        """Wait for code for other sizes. Compiled code keeps running all others."""
        self.waiting, self._waits_since, self._spent = True, None, 0.0
        self._ready, self._fast = [], None

    def _poll(self, now: float) -> None:
        try:
            if self._job is None:
                self._begin(now)
            elif now - self._last_report >= PATIENCE:
                self._last_report = now
                done, all_of_them = len(self._job.outcomes), len(self._job.keys)
                seconds = now - self._begun
                text = "still compiling after %.0f s, %d of %s done; the interpreter runs calls"
                self._announce(text, seconds, done, count_of(all_of_them))
            news = self._job is not None and self._job.poll()
            if news or (self._slow and now >= self._next_poll):
                self._next_poll = now + POLL_SECONDS
                self._take_over()
        except Exception as error:  # after any error, the results of the slow tier are right
            self._give_up(described(error))

    def _begin(self, now: float) -> None:
        idle = self._idle or int(self._cores.idle() + 1 - IDLE)
        pays = self._spent >= SHARE * self._expected
        if self._waits_since is None:
            self._waits_since = now
            if not idle and not pays:
                waiting = "compiling waits up to %.0f s for a free core"
                self._announce(f"captured; the interpreter runs calls, and {waiting}", PATIENCE)
        in_vain = not idle and not pays
        if in_vain and now - self._waits_since < PATIENCE:
            return
        missing = self._code.missing()
        if not missing:  # another process has just stored the last one
            return
        name, store = self._code.builder.name, self._code.store
        self._job = CompileJob(missing, name, store, max(1, idle), is_nice=in_vain)
        self._begun = self._last_report = now
        verb = f"{count_of(len(missing))} compile{'s' * (len(missing) == 1)}"
        if in_vain:
            text = "no core is free; the interpreter runs calls while %s at low priority"
            self._announce(text, verb)
        else:
            text = "captured; the interpreter runs calls while %s, for about %.0f s"
            self._announce(text, verb, WHILE_RUNNING * self._expected)

    def _take_over(self) -> None:
        found = self._code.found()
        complete = self._code.has_all(found)
        if not complete and self._job is not None and self._job.finished:
            outcomes = self._job.outcomes.values()
            failures = [why for outcome, why in outcomes if outcome == compiler_processes.FAILED]
            if failures:
                self._give_up(failures[0])
                return
            complete = True  # soon, because this process compiles the others
        if complete:
            # Signals are delayed while state is written, and nothing has been written yet in this
            # call.
            with interrupts.allowed(), interrupts.delivering():
                self._current = self._compiled()
            self._finish()
            self._fast = []
        elif len(found) > len(self._ready):
            self._current = self._with_fallback(self._code.mixed(found))
            self._ready = [*found]
            text = "%d of %d graphs compiled: %s, from call %d on"
            names = " and ".join(found)
            self._announce(text, len(found), len(self._code.keys), names, self._calls + 1)

    def _compiled(self) -> Executable:
        return self._with_fallback(self._code.compile(lambda share: None))

    def _with_fallback(self, fast: Executable) -> WithFallback:
        return WithFallback(fast, self._slow_tier, self._code.plan)

    def _compare(self, seconds: float) -> None:
        assert self._fast is not None
        self._fast.append(seconds)
        if len(self._fast) < COMPARED:
            return
        slow, fast = statistics.median(self._slow), statistics.median(self._fast)
        self._announce(
            "full speed from call %d on: %.1f times as fast, %.2f ms per call instead of %.2f ms",
            self._calls + 1,
            slow / fast,
            fast * 1e3,
            slow * 1e3,
        )
        self._fast = None

    def _give_up(self, why: str) -> None:
        self._finish()
        if self._code.ranges:
            self.unsuitable = _NOT_COMPILED.format(why)
        else:
            warn_of_failure(why)

    def _finish(self) -> None:
        self.waiting = False
        if self._job is not None:
            self._job.end()
            self._job = None


class OnDemand:
    """Runs a program whose code serves a range of sizes, and compiles when others occur."""

    def __init__(self, fast: WithFallback, slow: Callable[[], Executable], code: PlanCode) -> None:
        self._current, self._slow, self._code = fast, slow, code
        self.unsuitable: str | None = None  # why programs of one size are better

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.unsuitable is None and not self._current.gave_up:
            self._compile_for(batch)
        return self._current.run(state, batch)

    def _compile_for(self, batch: Sequence[torch.Tensor]) -> None:
        code = self._code
        try:
            while not code.serves(batch):
                code.announce(
                    "compiling for other sizes takes about %.0f s", code.expected_seconds()
                )
                # Signals are delayed while state is written, and nothing has been written yet.
                with interrupts.allowed(), interrupts.delivering():
                    compiled = code.compile(lambda share: None)
                self._current = WithFallback(compiled, self._slow, code.plan)
        except Exception as error:  # after any error, the interpreter runs these sizes
            if interrupts.is_from_handler(error):
                raise
            why = str(error) if isinstance(error, NotSymbolic) else described(error)
            self.unsuitable = _NOT_COMPILED.format(why)

    def report(self) -> Report:
        return self._current.report()
