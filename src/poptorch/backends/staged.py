"""Provide the backend ``staged``: it runs a schedule action by action, on chips with their own
tensors.

It checks plans and saves no time. Each stage draws from its own random stream, so all stages except
the first draw other numbers than in the fused program.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from .._base import interrupts
from .._base.errors import Error
from .._ir.plan import Plan, Report, Staged
from .._ir.program import State
from .._ir.schedule import Action
from .._ir.slots import Kind
from .chips import Replica, devices
from .driver import program_report
from .peers import MessagesOfRun, Peers
from .prepare import accept_strides, for_device
from .protocol import Executable, Progress
from .random_keys import RandomKeys, device_generator
from .results import Collector, ResultModes
from .rollback import Rollback

Column = tuple[int, list[Action]]
Slices = Sequence[Sequence[torch.Tensor]]  # by input


class StagedBackend:
    name = "staged"
    by_stages = True

    def unavailable(self) -> str | None:
        return None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        start = time.perf_counter()
        assert plan.staged is not None, "the staged backend needs a program that was cut"
        _check_results(plan, plan.staged)
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        progress(1.0)
        return StagedExecutable(plan, plan.staged, report)


def _check_results(plan: Plan, staged: Staged) -> None:
    graphs = [graph for each, graph in staged.graphs.items() if not each.is_update]
    written = {slot.key for graph in graphs for slot in graph.outputs}
    missing = [slot.path for slot in plan.program.emit.slots if slot.key not in written]
    if missing:
        raise Error(
            "The staged backend cannot return tensors that the update computes",
            got=f"anchored: {', '.join(missing)}",
            fix=(
                (
                    "remove options.anchorTensor for these tensors, and read the weights after "
                    "the call"
                ),
                "or use options.backend('reference')",
            ),
        )


def _columns(staged: Staged, chips: Sequence[int]) -> list[Column]:
    """Return the columns in which these chips do something, with their actions."""
    columns: dict[int, list[Action]] = {}
    for column, chip, action in staged.schedule.cells():
        if chip in chips:
            columns.setdefault(column, []).append(action)
    return [*columns.items()]


class StagedExecutable:
    def __init__(self, plan: Plan, staged: Staged, report: Report) -> None:
        self._plan = plan
        self._staged = staged
        self._report = report
        self._peers = Peers(staged, plan.spec)
        chips = self._peers.chips
        self._devices = dict(zip(chips, devices(len(chips)), strict=True))
        self._modules = {
            each: for_device(accept_strides(graph.copy().module), self._devices[chip].torch_device)
            for each, graph in staged.graphs.items()
            if (chip := staged.workload.chip_of(each)) in self._devices
        }
        self._changed_inputs = {
            slot.key: slot.index
            for graph in staged.graphs.values()
            for slot in graph.outputs
            if slot.kind is Kind.BATCH
        }
        self._columns = _columns(staged, chips)
        updates = [at for at, _, each in staged.schedule.cells() if each.stage_pass.is_update]
        self._update = min(updates, default=staged.schedule.columns)
        self._random = any(graph.random for graph in staged.graphs.values())
        self._rollback = Rollback(plan.program, checked=False, by_call=True, separate=True)

    def report(self) -> Report:
        return self._report

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._peers.check_inputs_agree(batch)
        loops = self._plan.program.loops
        slices = loops.cut(batch)
        first = self._plan.spec.first_replica
        self._rollback.begin(state, batch)
        keys = RandomKeys(state, loops) if self._random else None
        replicas = [
            Replica(self._staged, self._modules, self._devices, number, first, keys)
            for number in range(loops.replicas)
        ]
        flushes = loops.iterations if self._plan.spec.training else 1
        random = device_generator() if self._random else contextlib.nullcontext()
        with interrupts.deferred(), torch.no_grad(), random:
            try:
                for replica in replicas:
                    replica.fill(state)
                with self._peers.together():
                    for flush in range(flushes):
                        self._flush(flush, replicas, slices)
                    interrupts.check()
            except BaseException as error:
                self._rollback.roll_back(state, error)
                raise
            for replica in replicas:
                replica.copy_to_state(state)
            state.updates += flushes if self._plan.spec.training else 0
        self._return_inputs(replicas, slices, batch)
        return self._collected(replicas)

    def _flush(self, flush: int, replicas: Sequence[Replica], slices: Slices) -> None:
        """Run the whole schedule once: an update in training, all iterations in inference."""
        loops = self._plan.program.loops
        passing = MessagesOfRun(self._peers, replicas, lambda micro: loops.step(flush, micro))
        before = [each for each in self._columns if each[0] < self._update]
        after = self._columns[len(before) :]
        self._do(before, passing, flush, replicas, slices)
        if self._update < self._staged.schedule.columns:
            self._all_reduce(replicas)
            self._do(after, passing, flush, replicas, slices)

    def _do(
        self,
        columns: Sequence[Column],
        passing: MessagesOfRun,
        flush: int,
        replicas: Sequence[Replica],
        slices: Slices,
    ) -> None:
        """Run the actions of this process's chips in some columns."""
        loops = self._plan.program.loops
        with self._peers.exchange():
            for column, actions in columns:
                interrupts.check()
                passing.begin(column)
                for replica in replicas:
                    passing.receive_due(column, replica)
                    for action in actions:
                        step = loops.step(flush, action.micro_batch)
                        at = loops.slice_of(step, replica.number)
                        replica.do(action, step, [of_input[at] for of_input in slices])
                        passing.deliver(action, replica)
                    replica.exchange()
            passing.end()

    def _all_reduce(self, replicas: Sequence[Replica]) -> None:
        if self._plan.spec.loops.all_replicas == 1:
            return
        keys = replicas[0].gradients()
        totals = [torch.stack([each.read(key) for each in replicas]).sum(0) for key in keys]
        if self._plan.spec.loops.processes > 1:
            totals = [total.cpu() for total in totals]
            self._peers.all_reduce(totals)
        for key, total in zip(keys, totals, strict=True):
            for replica in replicas:
                replica.write(key, total)

    def _return_inputs(
        self, replicas: Sequence[Replica], slices: Slices, batch: Sequence[torch.Tensor]
    ) -> None:
        for replica in replicas:
            for (key, step), value in replica.results.items():
                if key in self._changed_inputs:
                    at = self._plan.program.loops.slice_of(step, replica.number)
                    slices[self._changed_inputs[key]][at].copy_(value)
        for key, index in self._changed_inputs.items():
            self._peers.share(key, batch[index])

    def _collected(self, replicas: Sequence[Replica]) -> list[torch.Tensor]:
        program = self._plan.program
        collector = Collector(program, ResultModes(program))
        keys = [slot.key for slot in program.emit.slots]
        remote = {
            slot.key: torch.empty(slot.shape, dtype=slot.dtype)
            for slot in program.emit.slots
            if not self._peers.is_maker(slot.key)
        }
        for step in range(program.loops.steps):
            for replica in replicas:
                own = replica.results
                results = [remote[k] if k in remote else own[k, step].cpu() for k in keys]
                collector.collect(keys, results, step, replica.number)
        collected = collector.results()
        for key, result in zip(keys, collected, strict=True):
            self._peers.share(key, result)
        return collected
