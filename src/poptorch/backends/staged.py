"""The staged backend: does a schedule's actions one by one, each on a chip with its own tensors.

It proves plans rather than saving time; with CUDA devices, chips work side by side. A pass that
reads a tensor which is not on its chip fails, whether it was never sent, not loaded, already stored
or already forgotten. Each stage draws from streams of its own, so that models with dropout in a
later stage than the first differ from the fused run by their draws.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .._base import interrupts
from .._base.errors import Error
from .._ir.plan import Plan, Report, Staged
from .._ir.program import State
from .._ir.slots import Kind
from .chips import Replica
from .crew import Crew
from .devices import at_home, devices
from .driver import Keys, device_generator, program_report
from .prepare import accept_strides
from .protocol import Executable, Progress
from .results import Collector, Wanted
from .whole import note


class ByStages:
    """Runs ``plan.staged`` literally with plain ATen operators."""

    name = "staged"
    by_stages = True

    def unavailable(self) -> str | None:
        """It always works."""
        return None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        """There is nothing to compile."""
        start = time.perf_counter()
        assert plan.staged is not None, "the staged backend needs a program that was cut"
        _check_results(plan, plan.staged)
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        progress(1.0)
        return StagedExecutable(plan, plan.staged, report)


def _check_results(plan: Plan, staged: Staged) -> None:
    """Only what stages make for a micro-batch comes back from them."""
    graphs = [graph for each, graph in staged.graphs.items() if not each.is_update]
    written = {slot.key for graph in graphs for slot in graph.outputs}
    missing = [slot.path for slot in plan.program.emit.slots if slot.key not in written]
    if missing:
        raise Error(
            "The staged backend returns nothing that the update makes",
            got=f"anchored: {', '.join(missing)}",
            fix="read the weights after the call, or use options.backend('reference')",
        )


class StagedExecutable:
    """Runs a schedule on as many replicas of a set of chips as the plan has.

    Attributes:
        most_values: by chip, the most values and inputs of micro-batches that waited on it at the
            end of any column.
    """

    def __init__(self, plan: Plan, staged: Staged, report: Report) -> None:
        self._plan = plan
        self._staged = staged
        self._report = report
        self._crew = Crew(staged, plan.spec)
        chips = self._crew.chips
        self._devices = dict(zip(chips, devices(len(chips)), strict=True))
        self._modules = {
            each: at_home(accept_strides(graph.copy().module), self._devices[chip].torch_device)
            for each, graph in staged.graphs.items()
            if (chip := staged.workload.chip_of(each)) in self._devices
        }
        self._changed_inputs = {
            slot.key: slot.index
            for graph in staged.graphs.values()
            for slot in graph.outputs
            if slot.kind is Kind.BATCH
        }
        self._random = any(graph.random for graph in staged.graphs.values())
        self.most_values: dict[int, int] = {}

    def report(self) -> Report:
        """Return what the program costs."""
        return self._report

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do one call; see ``Executable.run``."""
        self._crew.check_alike(batch)
        loops = self._plan.program.loops
        slices = [loops.cut(value) for value in batch]
        first, before = self._plan.spec.first_replica, state.rng
        keys = Keys(state, loops) if self._random else None
        replicas = [
            Replica(self._staged, self._modules, self._devices, number, first, keys)
            for number in range(loops.replicas)
        ]
        flushes = loops.iterations if self._plan.spec.training else 1
        with interrupts.deferred(), torch.no_grad(), device_generator(self._random):
            try:
                for replica in replicas:
                    replica.fill(state)
                with self._crew.together():
                    for flush in range(flushes):
                        self._flush(flush, replicas, slices)
                    interrupts.check()
            except BaseException as error:  # so far nothing was written
                state.rng = before
                error.add_note(note(0, 0))
                raise
            for replica in replicas:
                replica.give_back(state)
            state.updates += flushes if self._plan.spec.training else 0
        self._return_inputs(replicas, slices, batch)
        return self._collected(replicas)

    def _flush(
        self,
        flush: int,
        replicas: Sequence[Replica],
        slices: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Do the whole schedule once: an update in training, all iterations in inference."""
        schedule = self._staged.schedule
        reduced = not self._plan.spec.training
        for column in range(schedule.columns):
            interrupts.check()
            actions = [row[column] for row in schedule.rows.values()]
            doing = [action for action in actions if action is not None]
            if not reduced and any(action.stage_pass.is_update for action in doing):
                self._add_up(replicas)
                reduced = True
            steps = [self._plan.program.loops.step(flush, each.micro_batch) for each in doing]
            for replica in replicas:
                for action, step in zip(doing, steps, strict=True):
                    replica.do(action, step, self._rows(slices, step, replica.number))
                replica.exchange()
            self._crew.deliver(replicas, list(zip(doing, steps, strict=True)))
            for replica in replicas:
                for chip, count in replica.waiting().items():
                    self.most_values[chip] = max(count, self.most_values.get(chip, 0))

    def _rows(
        self, slices: Sequence[Sequence[torch.Tensor]], step: int, replica: int
    ) -> list[torch.Tensor]:
        """The micro-batch that a replica reads at a step."""
        at = self._plan.program.loops.slice_of(step, replica)
        return [of_input[at] for of_input in slices]

    def _add_up(self, replicas: Sequence[Replica]) -> None:
        """Give every replica the sum of all replicas' gradients, in all processes."""
        if self._plan.spec.loops.all_replicas == 1:
            return
        keys = replicas[0].gradients()
        totals = [torch.stack([each.read(key) for each in replicas]).sum(0) for key in keys]
        if self._plan.spec.loops.processes > 1:
            totals = [total.cpu() for total in totals]
            self._crew.add_up(totals)
        for key, total in zip(keys, totals, strict=True):
            for replica in replicas:
                replica.write(key, total)

    def _return_inputs(
        self,
        replicas: Sequence[Replica],
        slices: Sequence[Sequence[torch.Tensor]],
        batch: Sequence[torch.Tensor],
    ) -> None:
        for replica in replicas:
            for (key, step), value in replica.results.items():
                if key in self._changed_inputs:
                    at = self._plan.program.loops.slice_of(step, replica.number)
                    slices[self._changed_inputs[key]][at].copy_(value)
        for key, index in self._changed_inputs.items():
            self._crew.share(key, batch[index])

    def _collected(self, replicas: Sequence[Replica]) -> list[torch.Tensor]:
        program = self._plan.program
        emit = program.emit
        modes = {slot.key: emit.mode_of(slot.key) for slot in emit.slots}
        collector = Collector(program, Wanted(program, modes))
        keys = [slot.key for slot in emit.slots]
        elsewhere = {
            slot.key: torch.empty(slot.shape, dtype=slot.dtype)
            for slot in emit.slots
            if not self._crew.is_maker(slot.key)
        }
        for step in range(program.loops.steps):
            for replica in replicas:
                results = [
                    elsewhere[key] if key in elsewhere else replica.results[key, step].cpu()
                    for key in keys
                ]
                collector.take(keys, results, step, replica.number)
        collected = collector.results()
        for key, result in zip(keys, collected, strict=True):
            self._crew.share(key, result)
        return collected
