"""The device loop: walks a Program, calling one compiled function per Run.

Every backend that compiles graph by graph shares it. Which results a call returns, and how they are
put together, follows spec/executor.md section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .._base import interrupts
from .._ir.plan import Plan
from .._ir.program import Axis, Emit, Node, Program, Repeat, Run
from .._ir.report import Report
from .._ir.slot import Kind
from .._ir.spec import Loops
from .._ir.state import State
from ..enums import OutputMode
from .prepare import Prepared

Compiled = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Index = dict[Axis, int]


class LoopExecutable:
    """Runs a Plan whose graphs are compiled one by one.

    Args:
        plan: what is run.
        functions: by graph name, the prepared graph and its compiled form.
        report: what the program costs.
    """

    def __init__(
        self, plan: Plan, functions: Mapping[str, tuple[Prepared, Compiled]], report: Report
    ) -> None:
        self._program = plan.program
        self._functions = functions
        self._report = report
        self._random = plan.program.random
        self._bound: tuple[State, dict[str, _BoundRun]] | None = None

    def report(self) -> Report:
        """Return what the program costs."""
        return self._report

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do one call; see ``Executable.run``."""
        runs = self._bind(state)
        collector = Collector(self._program.emit, self._program.loops)
        slices = [_cut(value, self._program.loops.slices) for value in batch]
        index: Index = dict.fromkeys(Axis, 0)
        random = _device_generator(state, self._random)
        with interrupts.deferred(), torch.no_grad(), random:
            for node in self._program.body[:-1]:
                self._walk(node, runs, slices, index, collector)
        return collector.results()

    def _bind(self, state: State) -> dict[str, _BoundRun]:
        # State tensors keep their identity, so the argument lists are made once per State.
        if self._bound is None or self._bound[0] is not state:
            loops = self._program.loops
            runs = {
                name: _BoundRun(prepared, function, state, loops)
                for name, (prepared, function) in self._functions.items()
            }
            self._bound = state, runs
        return self._bound[1]

    def _walk(
        self,
        node: Node,
        runs: Mapping[str, _BoundRun],
        slices: Sequence[Sequence[torch.Tensor]],
        index: Index,
        collector: Collector,
    ) -> None:
        if isinstance(node, Repeat):  # what follows a loop belongs to its last round
            for step in range(node.count):
                index[node.axis] = step
                for child in node.body:
                    self._walk(child, runs, slices, index, collector)
        elif isinstance(node, Run):
            interrupts.check()
            run = runs[node.graph]
            collector.take(run.emitted, run(slices, index), index)
        else:
            raise NotImplementedError(f"this backend runs one process: {node}")


class _BoundRun:
    """One graph with its state arguments in place, waiting for batch slices."""

    def __init__(self, prepared: Prepared, function: Compiled, state: State, loops: Loops) -> None:
        self._function = function
        self._loops = loops
        self._batch = [
            (place, int(slot.path))
            for place, slot in enumerate(prepared.inputs)
            if slot.kind is Kind.BATCH
        ]
        self._counters = [
            (place, slot.path)
            for place, slot in enumerate(prepared.inputs)
            if slot.kind is Kind.COUNTER
        ]
        self._arguments: list[list[torch.Tensor | None]] = [
            [state.read(s.key, replica) if s.is_state else None for s in prepared.inputs]
            for replica in range(loops.replicas)
        ]
        self.emitted = [slot.key for slot in prepared.outputs]

    def __call__(
        self, slices: Sequence[Sequence[torch.Tensor]], index: Index
    ) -> Sequence[torch.Tensor]:
        loops, replica = self._loops, index[Axis.REPLICAS]
        arguments = list(self._arguments[replica])
        step = index[Axis.ITERATIONS] * loops.accumulation + index[Axis.ACCUMULATION]
        piece = step * loops.input_groups + loops.input_group(replica)
        for place, source in self._batch:
            arguments[place] = slices[source][piece]
        if self._counters:
            done = index[Axis.ACCUMULATION] * loops.replicas + replica
            for place, path in self._counters:
                arguments[place] = torch.tensor(float(replica if path == "replica" else done))
        return self._function(arguments)  # type: ignore[arg-type]


def _cut(value: torch.Tensor, pieces: int) -> Sequence[torch.Tensor]:
    if pieces == 1:
        return (value,)
    return value.view(pieces, value.shape[0] // pieces, *value.shape[1:]).unbind(0)


class _device_generator:  # noqa: N801 (used as a function)
    """Within the block torch's default generator continues the device's random sequence."""

    def __init__(self, state: State, needed: bool) -> None:
        self._state = state if needed else None

    def __enter__(self) -> None:
        if self._state is not None:
            self._host = torch.get_rng_state()
            assert self._state.rng is not None, "the device's generator was never seeded"
            torch.set_rng_state(self._state.rng)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.rng = torch.get_rng_state()
            torch.set_rng_state(self._host)


class Collector:
    """Keeps the results of the runs that the output mode wants and puts them together."""

    def __init__(self, emit: Emit, loops: Loops) -> None:
        self._emit = emit
        self._loops = loops
        self._modes = {slot.key: emit.mode_of(slot.key) for slot in emit.slots}
        self._kept: dict[str, list[torch.Tensor]] = {key: [] for key in self._modes}
        self._sums: dict[str, dict[int, torch.Tensor]] = {}

    def take(self, keys: Sequence[str], values: Sequence[torch.Tensor], index: Index) -> None:
        """Look at the results of one run."""
        for key, value in zip(keys, values, strict=True):
            if key not in self._modes:
                continue
            mode, period = self._modes[key]
            if mode is OutputMode.Sum:
                sums, replica = self._sums.setdefault(key, {}), index[Axis.REPLICAS]
                sums[replica] = sums[replica] + value if replica in sums else value
            elif self._wanted(mode, period, index):
                self._kept[key].append(value)

    def _wanted(self, mode: OutputMode, period: int, index: Index) -> bool:
        iteration, step = index[Axis.ITERATIONS], index[Axis.ACCUMULATION]
        if mode is OutputMode.Final:
            last = (self._loops.iterations - 1, self._loops.accumulation - 1)
            return (iteration, step) == last
        if mode is OutputMode.EveryN:
            return (iteration + 1) % period == 0
        return True

    def results(self) -> list[torch.Tensor]:
        """One tensor per emitted slot: scalars stacked, others joined along dimension 0."""
        summed = {key: list(sums.values()) for key, sums in self._sums.items()}
        kept = {**self._kept, **summed}
        return [_joined(kept[slot.key]) for slot in self._emit.slots]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)


def program_report(backend: str, program: Program, seconds: float) -> Report:
    """Return the plain figures of a compiled program."""
    size = sum(
        torch.Size(slot.shape).numel() * slot.dtype.itemsize
        for slot in program.state_slots().values()
    )
    nodes = tuple((name, len(g.module.graph.nodes)) for name, g in program.graphs.items())
    return Report(backend, size, nodes, seconds)
