"""Let ONNX Runtime take over an inference program from compiled code, if it is faster.

A second process exports the program at low priority. Then one call runs both, and their results are
compared. In the following calls both run in turns and are timed, and the faster one stays. The
times are kept with the compiled code, so that later processes need not compare again.

A session of ONNX Runtime has the weights as constants. After a change of the weights, compiled code
runs until the time that it has lost would have paid for a new session.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from .._base import interrupts, log
from .._base.errors import Error, described
from .._base.resources import IDLE, Cores, available_memory
from .._eager.replay import replay
from .._ir.backend_names import AUTO
from .._ir.closeness import coarsest, difference, movement, share_of
from .._ir.graph import Graph
from .._ir.indices import preconditions
from .._ir.plan import Plan, Report
from .._ir.program import State
from .._ir.tensors import Tensors
from ..backends import Builder, Compiled, Executable
from ..backends.driver import LoopExecutable, program_report
from ..backends.onnx_runtime import InputNotFinite, Sessions
from ..backends.protocol import finder_of_shortcuts
from . import compiler_processes, registry
from .cache import Choice, choice_key
from .compiler_processes import CompileJob
from .plan_code import PlanCode

OTHER = "onnxruntime"
# Seconds of calls of compiled code before an earlier choice is looked up, and before a new one.
EARLY, FIRST = 0.1, 1.0
POLL_SECONDS = 0.5  # seconds between two checks for a free core or the exported program
EXPORTING, SHARE = 10.0, 0.5  # seconds of an export; without a free core, it waits for this share
# Seconds of timed calls, and the smallest and the largest number of timed calls of each.
TRIAL, FEWEST, MOST = 0.25, 3, 50
# Seconds of calls of one runtime that are not timed after the other one has run. OpenMP's threads
# spin for a few milliseconds after a call, on the cores of the next one, and the caches are cold.
SETTLED = 0.006
GAIN = 0.95  # the share of compiled code's time below which a copy of the weights is justified
_MEMORY = 0.25  # the largest share of the free memory that a session may need

NextCall = Callable[["Fastest", State, Tensors], Tensors]


def considering(executable: Executable, plan: Plan, code: PlanCode) -> Executable:
    """Return an executable that may continue on ONNX Runtime, or the same one if that is ruled
    out.
    """
    spec, (first, *more) = plan.spec, plan.program.graphs.values()
    ruled_out = (
        spec.target.backend != AUTO
        or spec.training
        or spec.runs_together
        or spec.runtime.is_reported
        or code.is_symbolic
        or len(code.keys) < len(code.graphs)
        or bool(more)
        or bool(first.updates)
        or first.random
        or code.builder.name != registry.BEST
        or registry.available()[OTHER].unavailable() is not None
    )
    return executable if ruled_out else Fastest(executable, plan, code)


class Unsuitable(Exception):  # noqa: N818 (nothing went wrong)
    """ONNX Runtime cannot run the program. The message says why.

    Args:
        stays: whether this is also true in other processes.
    """

    def __init__(self, why: str, stays: bool = False) -> None:
        super().__init__(why)
        self.stays = stays


class OnnxProgram:
    """A program on ONNX Runtime: its exported graph, and a session for the present weights."""

    def __init__(self, plan: Plan, code: PlanCode) -> None:
        builder = registry.available()[OTHER]
        assert isinstance(builder, Builder)
        try:
            self._code = PlanCode(plan, builder, code.store)
        except Error as error:
            raise Unsuitable(described(error)) from error
        self.key = choice_key(code.keys, self._code.keys)
        self._job: CompileJob | None = None
        self._executable: Sessions | None = None

    def check(self) -> None:
        """Refuse programs for which the two runtimes may differ in errors, and too large ones.

        Raises:
            Unsuitable: there is a reason.
        """
        plan = self._code.plan
        if len(self._code.keys) < len(self._code.graphs):
            raise Unsuitable("the program has no text form")
        checked = plan.spec.precision.check_indices
        if any(each != () for each in preconditions(plan.program.graphs, checked).values()):
            raise Unsuitable("a call may raise an error because of a value")
        needed, free = sum(s.bytes for s in plan.program.stored.values()), available_memory()
        if needed > _MEMORY * free:
            raise Unsuitable(f"the weights take {needed >> 20} MiB; {free >> 20} MiB are free")

    @property
    def is_being_exported(self) -> bool:
        return self._job is not None

    def export(self) -> None:
        """Let another process export the program, at low priority."""
        missing = self._code.missing()
        if missing:
            self._job = CompileJob(missing, OTHER, self._code.store, 1, is_nice=True)

    def is_ready(self) -> bool:
        """Return whether the program is exported and loaded.

        Raises:
            Unsuitable: it cannot be.
        """
        if self._executable is not None:
            return True
        failures = []
        if self._job is not None:
            self._job.poll()
            if not self._job.finished:
                return False
            outcomes = self._job.outcomes.values()
            failures = [why for outcome, why in outcomes if outcome != compiler_processes.STORED]
        found = self._code.found()
        if len(found) == len(self._code.keys):
            executable = self._code.builder.assemble(self._code.plan, found, 0.0)
            assert isinstance(executable, Sessions), "the other runtime is this one"
            executable.only_finite = True
            self._executable = executable
        elif self._job is not None:
            cannot_be_read = "the exported program cannot be read"
            raise Unsuitable(failures[0] if failures else cannot_be_read, stays=bool(failures))
        self._job = None
        return self._executable is not None

    @staticmethod
    def fits(state: State) -> bool:
        """Return whether there is a session for the present weights."""
        bound = None if state.other is None else state.other.bound
        return bound is not None and bound[1] == state.writes.count

    def run(self, state: State, batch: Tensors) -> Tensors:
        """Run the program, with a new session if the weights have changed.

        Raises:
            Unsuitable: a value may be treated differently than in eager PyTorch. For example,
                pooling ignores NaN.
        """
        assert self._executable is not None, "only called when it is there"
        if state.writes.released:  # a session may read weights where they are
            state.writes.restore()
        if not self.fits(state) and any(map(_has_nan, state.values.values())):
            raise Unsuitable("a weight is NaN")
        try:
            return self._executable.run(state.for_second_executable(), batch)
        except InputNotFinite as error:
            raise Unsuitable("an input is infinite or NaN") from error

    def shortcut(self, state: State) -> Compiled | None:
        """Return the function of the session for the present weights, if there is one."""
        assert self._executable is not None, "only called when it is there"
        return None if state.other is None else self._executable.shortcut(state.other)

    def report(self) -> Report:
        assert self._executable is not None, "only called when it is there"
        return self._executable.report()


class Fastest:
    """Runs compiled code, compares ONNX Runtime with it, and continues with the faster one."""

    def __init__(self, ours: Executable, plan: Plan, code: PlanCode) -> None:
        self._ours, self._plan, self._code = ours, plan, code
        # what the next call does, or None once compiled code has been chosen
        self._do: NextCall | None = Fastest._wait
        self._other: OnnxProgram | None = None
        self._choice: Choice | None = None
        self._cores, self._next_poll = Cores(), 0.0
        self._calls = 0  # number of calls, of either runtime
        self._spent, self._enough = 0.0, EARLY  # seconds of calls of compiled code
        # seconds of the timed calls: of compiled code, and of ONNX Runtime
        self._times: tuple[list[float], list[float]] = ([], [])
        # whether the present calls run ONNX Runtime, and when this began
        self._turn_of_other, self._turn = False, 0.0
        self._session = 0.0  # seconds that it took to make a session
        self._since = 0  # calls of compiled code since the weights have changed
        self._writes = -1  # how many times the weights had changed

    def run(self, state: State, batch: Tensors) -> Tensors:
        do = self._do
        return self._ours.run(state, batch) if do is None else do(self, state, batch)

    @property
    def shortcut(self) -> Callable[[State], Compiled | None] | None:
        """The shortcut of the runtime that has been chosen."""
        if self._do is None:
            return finder_of_shortcuts(self._ours)
        return self._other.shortcut if self.decided and self._other is not None else None

    @property
    def waiting(self) -> bool:
        """Whether the interpreter runs the program, until compiled code is ready."""
        return bool(getattr(self._ours, "waiting", False))

    @property
    def decided(self) -> bool:
        return self._do is None or self._do is Fastest._run_other

    def report(self) -> Report:
        if self._do is Fastest._run_other:
            assert self._other is not None, "it was chosen"
            return dataclasses.replace(self._other.report(), threads=f"({self._choice})")
        report = self._ours.report()
        if self._choice is None or self._choice.why or not self.decided:
            return report
        line = f"ONNX Runtime is not faster: {self._choice}"
        return dataclasses.replace(report, libraries=(*report.libraries, line))

    # What a call does, in this order.

    def _wait(self, state: State, batch: Tensors) -> Tensors:
        """Run compiled code, until it has run for a while and the exported program is there."""
        if self.waiting:
            return self._ours.run(state, batch)
        start = time.perf_counter()
        results = self._ours.run(state, batch)
        now = time.perf_counter()
        self._calls += 1
        self._spent += now - start
        if self._spent >= self._enough and now >= self._next_poll and _may_round_differently():
            self._next_poll = now + POLL_SECONDS
            try:
                self._advance()
            except Exception as error:  # compiled code runs the program, whatever happens here
                if interrupts.is_from_handler(error):
                    raise
                self._rule_out(error, isinstance(error, Unsuitable) and error.stays)
        return results

    def _advance(self) -> None:
        if self._ours.report().backend != self._code.builder.name:
            raise Unsuitable("the program no longer runs compiled code")
        if self._other is None:
            self._other = OnnxProgram(self._plan, self._code)
            self._choice = self._code.store.choice(self._other.key)
            self._enough = FIRST
            self._cores.idle()  # measured from now on
            if self._choice is not None and not self._choice.pays(GAIN):
                self._keep_compiled_code()
                return
        elif self._choice is None and not self._other.is_being_exported:
            self._other.check()
        if self._choice is None and self._spent < self._enough:
            return
        if self._other.is_ready():
            if self._choice is None:
                self._do = Fastest._compare
            else:
                self._use_other()
        elif not self._other.is_being_exported:
            idle, pays = self._cores.idle() >= IDLE, self._spent >= SHARE * EXPORTING
            if idle or pays:
                self._other.export()

    def _compare(self, state: State, batch: Tensors) -> Tensors:
        """Run both. If their results agree, let both run alternately from the next call on."""
        results = self._ours.run(state, batch)
        try:
            why = self._disagreement(state, batch, results)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            self._release(state)
            self._rule_out(error)
            return results
        if why:
            self._release(state)
            self._rule_out(Unsuitable(why), stays=True)
        else:
            self._do = Fastest._alternate
        return results

    def _disagreement(self, state: State, batch: Tensors, results: Tensors) -> str:
        assert self._other is not None, "it is there"
        start = time.perf_counter()
        found = self._other.run(state, batch)
        self._session = time.perf_counter() - start
        why = self._first_difference(found, results)
        if why:
            own = State(state.values, writes=state.writes)  # nothing else is bound to it
            why = self._first_difference(found, results, self._nudged().run(own, batch))
        return why

    def _first_difference(
        self, found: Tensors, expected: Tensors, nudged: Tensors | None = None
    ) -> str:
        """Describe the first result that differs by more than rounding; empty if none does.

        Args:
            found: the results to check.
            expected: those of compiled code.
            nudged: the results if every operator rounds once more, to see what rounding does.
        """
        program = self._plan.program
        share = share_of(max(map(coarsest, program.graphs.values())))
        moved = [0.0] * len(expected)
        if nudged is not None:
            moved = [movement(*pair) for pair in zip(expected, nudged, strict=True)]
        for slot, own, other, far in zip(program.emit.slots, expected, found, moved, strict=True):
            if own.dtype != other.dtype:
                return f"{slot.key} is {other.dtype} instead of {own.dtype}"
            differs = difference(slot.key, other, own, share, far)
            if differs is not None:
                return str(differs)
        return ""

    def _alternate(self, state: State, batch: Tensors) -> Tensors:
        """Run one of the two, and measure the time. When both have run often enough, choose.

        Later, only one of them will run. So each runs for a while before one of its calls is timed.
        """
        assert self._other is not None, "it is there"
        if not self._other.fits(state) or not _may_round_differently():  # the weights have changed
            self._release(state)
            self._times = ([], [])
            self._do, self._spent = Fastest._wait, 0.0
            return self._ours.run(state, batch)
        ours, other = self._times
        is_other = len(other) < len(ours)
        start = time.perf_counter()
        if is_other is not self._turn_of_other:
            self._turn_of_other, self._turn = is_other, start
        results = self._run_safely(state, batch) if is_other else self._ours.run(state, batch)
        self._calls += 1
        if start - self._turn >= SETTLED:
            self._times[is_other].append(time.perf_counter() - start)
        if self._do is not Fastest._alternate:  # the other one has just failed
            return results
        count, spent = len(other) - 1, sum(ours) + sum(other)  # the first ones fill the caches
        if count >= MOST or (count >= FEWEST and spent >= TRIAL):
            self._choose(state)
        return results

    def _run_other(self, state: State, batch: Tensors) -> Tensors:
        """Run ONNX Runtime, unless there is no session for the present weights yet."""
        assert self._other is not None, "it was chosen"
        if self._other.fits(state):
            return self._run_safely(state, batch)
        assert self._choice is not None, "it was chosen"
        if self._writes != state.writes.count:
            self._writes, self._since = state.writes.count, 0
            state.other = None  # release the session for the old weights
        self._since += 1
        is_too_early = self._since * self._choice.gain < self._choice.session
        if is_too_early or not _may_round_differently():
            return self._ours.run(state, batch)
        results = self._run_safely(state, batch)
        state.bound = None  # release what compiled code has prepared
        return results

    # What they share.

    def _run_safely(self, state: State, batch: Tensors) -> Tensors:
        """Run ONNX Runtime. If it fails where compiled code does not, it is not used any more."""
        assert self._other is not None, "it is there"
        try:
            return self._other.run(state, batch)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            results = self._ours.run(state, batch)
            self._release(state)
            self._rule_out(error)
            return results

    def _choose(self, state: State) -> None:
        assert self._other is not None, "it is there"
        ours, other = (statistics.median(times[1:]) for times in self._times)
        self._choice = Choice(ours, other, self._session)
        self._code.store.note_choice(self._other.key, self._choice)
        if self._choice.pays(GAIN):
            text = "ONNX Runtime runs the program from call %d on: %s"
            self._code.announce(text, self._calls + 1, self._choice)
            self._use_other()
            state.bound = None
        else:
            text = "Calls continue to run compiled code, because ONNX Runtime is not faster: %s"
            log.engine.info(text, self._choice)
            self._release(state)
            self._keep_compiled_code()

    def _rule_out(self, error: Exception, stays: bool = False) -> None:
        """Continue with compiled code. With ``stays``, other processes do the same."""
        why = str(error) if isinstance(error, Unsuitable) else described(error)
        log.engine.debug("ONNX Runtime does not run the program: %s", why)
        self._choice = Choice(0.0, 0.0, 0.0, why)
        if self._other is not None and stays:
            self._code.store.note_choice(self._other.key, self._choice)
        self._keep_compiled_code()

    def _use_other(self) -> None:
        assert self._other is not None, "it was chosen"
        self._do = Fastest._run_other

    def _keep_compiled_code(self) -> None:
        self._other = self._do = None

    @staticmethod
    def _release(state: State) -> None:
        """Release the session, and let compiled code release plain weights again."""
        state.other = state.bound = None

    def _nudged(self) -> Executable:
        """Return an executable that rounds the results of every operator once more, at random."""
        program = self._plan.program
        functions = {name: _nudging(graph) for name, graph in program.graphs.items()}
        return LoopExecutable(self._plan, functions, program_report("nudged", program, 0.0))


def _nudging(graph: Graph) -> Compiled:
    def run(arguments: Tensors) -> Tensors:
        values = dict(zip((slot.key for slot in graph.inputs), arguments, strict=True))
        results = replay(graph, values, (), nudge=True)
        return [results[slot.key] for slot in graph.outputs]

    return run


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def _may_round_differently() -> bool:
    return not torch.are_deterministic_algorithms_enabled()
