"""Run the loops of a program, for all backends that compile graph by graph: one function per
``Run``.

A signal that arrives during a call takes effect between two runs (``_base.interrupts``), and
``rollback`` then undoes the call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import _job
from .._base import interrupts, private
from .._ir import slots
from .._ir.plan import Plan, Report
from .._ir.program import Axis, Emit, Gather, Node, Program, Reduce, Repeat, Run, Scatter, State
from .._ir.slots import Kind
from .._ops import random_streams
from .._ops.effects import is_effect
from . import stopwatch
from .failing import explained
from .prepare import returned
from .protocol import Compiled, Failure
from .random_keys import RandomKeys, device_generator
from .results import Collector, ResultModes
from .rollback import Rollback
from .thread_count import Threads

_GRADIENTS, _SQUARES = "the gradients of an update", "the squares of an update"


class Point(NamedTuple):
    """A node of the program at one position in its loops. After a loop, the position is its last
    iteration.
    """

    node: Run | Reduce | Scatter | Gather
    iteration: int
    chunk: int
    accumulated: int
    replica: int
    step: int
    slice: int  # index in the combined batch


class LoopExecutable:
    """Runs a plan with the functions of its graphs. With ``in_place``, these write results while
    they run.
    """

    by_call = False  # whether a failing call undoes all of its updates

    def __init__(
        self, plan: Plan, functions: Mapping[str, Compiled], report: Report, in_place: bool = False
    ) -> None:
        self._plan, self._program = plan, plan.program
        self._functions = functions
        self._report = report
        self._random = {name for name, graph in plan.program.graphs.items() if graph.random}
        self._writes = any(graph.updates for graph in plan.program.graphs.values())
        self._keys: RandomKeys | None = None
        self._modes = ResultModes(plan.program)
        self._points = list(_points(plan.program))
        self._is_one_run = self._runs_once()
        # whether ``_once`` may run the program
        self._is_simple = self._is_one_run and not (self._random or self.by_call)
        self._handed: dict[str, torch.Tensor] = {}  # passed from one graph to the next
        self._in_flight: list[Any] = []
        self._threads = Threads()
        # both set the mode when they are called; torch's public function takes 1 us longer
        self._set_grad_enabled = private.optional("set_grad_enabled") or torch.set_grad_enabled
        self._prepares = plan.program.prepare is not None
        checked = plan.spec.precision.check_indices
        self._rollback = Rollback(plan.program, checked, self.by_call, in_place)

    def report(self) -> Report:
        prepared = self._program if self._program.prepare is not None else None
        threads = self._threads.decision
        return dataclasses.replace(self._report, threads=threads, prepared=prepared)

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        enabled = torch.is_grad_enabled()
        try:
            self._set_grad_enabled(False)
            run = self._once if self._is_simple else self._whole
            return self._threads.run(run, state, batch)
        finally:
            self._set_grad_enabled(enabled)

    def _whole(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run everything, or leave everything as it was."""
        loop = device_generator()(self._loop) if self._random else self._loop
        self._rollback.failure = None
        if self._rollback.is_needed:
            self._rollback.begin(state, batch)
        try:
            results = loop(state, batch)
            interrupts.check()
        except BaseException as error:
            try:
                self._give_up()
            finally:
                self._rollback.roll_back(state, error)
            raise
        return results

    @property
    def failure(self) -> Failure | None:
        return self._rollback.failure

    def _loop(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        runs = self._bind(state)
        if self._random:
            self._keys = RandomKeys(state, self._program.loops)
        if self._is_one_run:
            (run,) = runs.values()
            results = self._run(run, state, batch, self._points[0])
        else:
            results = self._collected(runs, state, batch)
        if self._writes:
            self._wrote(state)
        return results

    def _once(self, state: State, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a program that is one run: all of ``_whole`` that it needs, in fewer steps."""
        rollback, running = self._rollback, None
        rollback.failure = None
        if rollback.is_needed:
            rollback.begin(state, batch)
        try:
            if interrupts.noted:
                interrupts.check()
            (run,) = self._bind(state).values()
            name, watch = run.name, stopwatch.current.get()
            running = name
            if watch is None:
                results = run(batch, self._points[0])
            else:
                results = watch.action(name, run, batch, self._points[0])
            running = None
            if self._writes:
                rollback.ran(name, state)
                self._wrote(state)
                if interrupts.noted:
                    interrupts.check()
            return results
        except BaseException as error:
            rollback.running = running
            rollback.roll_back(state, error)
            raise

    def shortcut(self, state: State) -> Compiled | None:
        """Return a function that makes the next call, if the program is bound to the state and
        changes nothing.
        """
        bound = state.bound
        is_bound = bound is not None and bound[0] is self
        if bound is None or not is_bound or bound[1] not in (None, state.writes.count):
            return None
        if not self._can_be_repeated:
            return None
        (run,) = bound[2].values()
        turn, threads, point = self._set_grad_enabled, self._threads.run, self._points[0]
        is_enabled = torch.is_grad_enabled

        def call(batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            enabled = is_enabled()
            try:
                turn(False)
                return threads(run, batch, point)
            finally:
                turn(enabled)

        return call

    @functools.cached_property
    def _can_be_repeated(self) -> bool:
        """Return whether a call that fails may be made again."""
        if not self._is_simple or self._writes or self._rollback.is_needed:
            return False
        (graph,) = self._program.graphs.values()
        return not any(map(is_effect, graph.module.graph.nodes))

    def _runs_once(self) -> bool:
        """Return whether the program is one run of one graph, and returns what that returns."""
        program, result_modes = self._program, self._modes
        several = len(self._points) > 1 or len(program.graphs) > 1
        if several or program.lanes is not None or result_modes.sums:
            return False
        (graph,) = program.graphs.values()
        emitted = [slot.key for slot in returned(graph)]
        return emitted == list(result_modes.modes) and all(map(result_modes.of(0).get, emitted))

    def _collected(
        self, runs: Mapping[str, _PreparedRun], state: State, batch: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        program = self._program
        collector = Collector(program, self._modes)
        slices = program.loops.cut(batch, program.lanes)
        for point in self._points:
            if isinstance(point.node, Run):
                run, part = runs[point.node.graph], [each[point.slice] for each in slices]
                results = self._run(run, state, part, point)
                collector.collect(run.emitted, results, point.step, point.replica)
            else:
                self._rollback.exchanged = True
                self._in_flight = exchange(point.node, state, self._in_flight)
        return collector.results()

    def _wrote(self, state: State) -> None:
        """Record that this program wrote to the state, so that others prepare their values
        again.
        """
        state.writes.count += 1
        if self._prepares:
            assert state.bound is not None
            state.bound = self, state.writes.count, state.bound[2]

    def _give_up(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        self._handed.clear()
        if in_flight:  # in all processes, because the exchange writes to the state until it ends
            _job.current().finish(in_flight, _GRADIENTS)

    def _bind(self, state: State) -> dict[str, _PreparedRun]:
        # State tensors keep their identity. The argument lists are therefore made once per State,
        # and made again when weights have changed from which values were prepared.
        bound = state.bound
        if bound is None or bound[0] is not self or bound[1] not in (None, state.writes.count):
            with interrupts.deferred():
                bound = state.bound = self._bound(state)
        runs: dict[str, _PreparedRun] = bound[2]
        return runs

    def _bound(self, state: State) -> tuple[object, int | None, dict[str, _PreparedRun]]:
        state.bound = None  # release old values before new ones are made
        state.writes.restore()
        ready = self._prepared(state)
        runs = {
            name: _PreparedRun(name, function, state, self._plan, self._handed, ready)
            for name, function in self._functions.items()
        }
        return self, state.writes.count if self._prepares else None, runs

    def _prepared(self, state: State) -> Mapping[str, torch.Tensor]:
        """Return inputs of graphs that only depend on weights, by key."""
        return {}

    def _run(
        self, run: _PreparedRun, state: State, batch: Sequence[torch.Tensor], point: Point
    ) -> Sequence[torch.Tensor]:
        interrupts.check()
        if run.name in self._random:
            random_streams.begin(self._seeds(point.step, point.replica))
        try:
            results: Sequence[torch.Tensor] = stopwatch.action(run.name, run, batch, point)
        except BaseException:
            self._rollback.running = run.name
            raise
        self._rollback.ran(run.name, state)
        return results

    def _seeds(self, step: int, replica: int) -> list[int]:
        lanes, first, keys = self._program.lanes, self._plan.spec.first_replica, self._keys
        assert keys is not None
        if lanes is None:
            return [keys.seed(step, first + replica)]
        places = itertools.product(range(lanes.steps), range(lanes.replicas))
        return [keys.seed(step + at, first + each) for at, each in places]


class _PreparedRun:
    def __init__(
        self,
        name: str,
        function: Compiled,
        state: State,
        plan: Plan,
        handed: dict[str, torch.Tensor],
        ready: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.function = name, function
        self._handed = handed
        self._first_replica = plan.spec.first_replica
        program = self._program = plan.program
        graph = self._graph = program.graphs[name]
        outputs, inputs = returned(graph), list(enumerate(graph.inputs))
        self._batch = [(at, s.index) for at, s in inputs if s.kind is Kind.BATCH]
        block = _block(self._batch)
        self._counters = [(at, s) for at, s in inputs if s.kind is Kind.COUNTER]
        values = [(at, s.key) for at, s in inputs if s.kind is Kind.VALUE]
        self._taken = [(at, key) for at, key in values if key not in ready]
        self._given = [(at, s.key) for at, s in enumerate(outputs) if s.kind is Kind.VALUE]
        self._has_batch_alone = not (self._counters or self._taken)
        self._device = state.device
        stacked = program.lanes is not None  # such a program reads all replicas at once
        self._arguments: list[list[torch.Tensor | None]] = [
            [state.read(s, replica) if s.is_state else ready.get(s.key) for _, s in inputs]
            for replica in range(1 if stacked else program.loops.replicas)
        ]
        # the arguments before and after the batch, if it is passed as a whole
        self._around = (
            [(each[: block.start], each[block.stop :]) for each in self._arguments]
            if block is not None
            else None
        )
        self.emitted = [slot.key for slot in outputs]

    def __call__(self, batch: Sequence[torch.Tensor], point: Point) -> Sequence[torch.Tensor]:
        if self._around is not None and len(batch) == len(self._batch):
            before, after = self._around[point.replica]
            arguments = [*before, *batch, *after]
        else:
            arguments = self._arguments[point.replica].copy()
            for place, given in self._batch:
                arguments[place] = batch[given]
        if not self._has_batch_alone:
            self._add_others(arguments, point)
        try:
            results = self.function(arguments)  # type: ignore[arg-type]
        except (RuntimeError, IndexError) as error:
            better = explained(error, self._graph, arguments)
            if better is error:
                raise
            raise better from error
        for place, key in self._given:
            self._handed[key] = results[place]
        return results

    def _add_others(self, arguments: list[torch.Tensor | None], point: Point) -> None:
        """Add counters and what other graphs have returned."""
        for place, slot in self._counters:
            of_all = self._first_replica + point.replica
            count = of_all if slot == slots.REPLICA else self._before(point)
            arguments[place] = torch.tensor(float(count), device=self._device)
        for place, key in self._taken:
            arguments[place] = self._handed.pop(key)

    def _before(self, point: Point) -> int:
        """Return the number of earlier runs of the same kind in the same update."""
        if self._program.lanes is not None:
            return point.chunk
        return self._program.loops.micro_batch(point.accumulated, point.replica)


def _block(batch: Sequence[tuple[int, int]]) -> slice | None:
    """Return where a graph takes its batch, given as pairs of place and index, or None if it does
    not take the tensors side by side and in their order.
    """
    places, indices = [place for place, _ in batch], [index for _, index in batch]
    if not batch or indices != list(range(len(batch))):
        return None
    first, after = places[0], places[0] + len(places)
    return slice(first, after) if places == list(range(first, after)) else None


def exchange(
    node: Reduce | Scatter | Gather, state: State, in_flight: Sequence[Any] = ()
) -> list[Any]:
    """Make a node's exchange between processes. Return the reductions in flight afterwards."""
    group, tensors = _job.current(), state.tensors
    if isinstance(node, Gather):
        group.all_gather([tensors[s.whole.slot.key] for s in node.shards], "the updated weights")
    elif isinstance(node, Reduce):
        own = [tensors[bucket.slot.key] for bucket in node.buckets]
        what = _GRADIENTS if node.kind == Kind.ACCUM else _SQUARES
        if not node.waits:
            return [*in_flight, *group.begin(own, what)]
        group.all_reduce(own, what, begun=in_flight)
    else:  # parts are views; gloo sums 64 MB in 172 ms, and scatters the sums in 344 ms
        wholes = [tensors[whole.key] for whole, _ in node.pairs]
        group.all_reduce(wholes, _GRADIENTS, begun=in_flight)
        # the update sets these to zero
        for whole, (_, part) in zip(wholes, node.pairs, strict=True):
            first = tensors[part.key].storage_offset() - whole.storage_offset()
            whole[:first].zero_()
            whole[first + part.numel :].zero_()
    return []


def _points(program: Program) -> Iterator[Point]:
    lanes, loops, index = program.lanes, program.loops, dict.fromkeys(Axis, 0)
    for node in _leaves(program.body, index):
        iteration, chunk, accumulated, replica = index.values()
        step = loops.step(iteration, accumulated) + chunk * (lanes.steps if lanes else 1)
        at = step // lanes.steps if lanes else loops.slice_of(step, replica)
        yield Point(node, iteration, chunk, accumulated, replica, step, at)


def _leaves(
    nodes: Sequence[Node], index: dict[Axis, int]
) -> Iterator[Run | Reduce | Scatter | Gather]:
    for node in nodes:
        if isinstance(node, Repeat):
            for step in range(node.count):
                index[node.axis] = step
                yield from _leaves(node.body, index)
        elif not isinstance(node, Emit):
            yield node


def program_report(backend: str, program: Program, seconds: float) -> Report:
    prepared = program.prepare.outputs if program.prepare is not None else ()
    size = sum(slot.bytes for slot in (*program.stored.values(), *prepared))
    nodes = tuple((name, len(g.module.graph.nodes)) for name, g in program.graphs.items())
    return Report(backend, size, nodes, seconds)
