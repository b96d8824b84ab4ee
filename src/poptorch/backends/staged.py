"""The staged backend: does a schedule's actions one by one, each on a chip with its own tensors.

It proves plans rather than saving time. Stages draw from streams of their own: all but the first
draw other numbers than in the fused run.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Sequence

import torch

from .. import _job
from .._base import interrupts
from .._base.errors import Error
from .._ir.blocks import StagePass
from .._ir.plan import Plan, Report, Staged
from .._ir.program import State
from .._ir.schedule import Action
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from .chips import Name, Replica, devices
from .driver import Collector, Keys, Slices, Wanted, device_generator, program_report
from .prepare import accept_strides, at_home
from .protocol import Executable, Progress
from .rollback import note

_VALUES = "what stages hand to one another"
_RESULTS = "the results of a call"


class ByStages:
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
            "The staged backend returns nothing that the update makes",
            got=f"anchored: {', '.join(missing)}",
            fix="read the weights after the call, or use options.backend('reference')",
        )


class StagedExecutable:
    def __init__(self, plan: Plan, staged: Staged, report: Report) -> None:
        self._plan = plan
        self._staged = staged
        self._report = report
        self._peers = Peers(staged, plan.spec)
        chips = self._peers.chips
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

    def report(self) -> Report:
        return self._report

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._peers.check_alike(batch)
        loops = self._plan.program.loops
        slices = loops.cut(batch)
        first, before = self._plan.spec.first_replica, state.rng
        keys = Keys(state, loops) if self._random else None
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
            except BaseException as error:  # so far nothing was written
                state.rng = before
                error.add_note(note(0, 0))
                raise
            for replica in replicas:
                replica.give_back(state)
            state.updates += flushes if self._plan.spec.training else 0
        self._return_inputs(replicas, slices, batch)
        return self._collected(replicas)

    def _flush(self, flush: int, replicas: Sequence[Replica], slices: Slices) -> None:
        """Do the whole schedule once: an update in training, all iterations in inference."""
        schedule, loops = self._staged.schedule, self._plan.program.loops
        reduced = not self._plan.spec.training
        for column in range(schedule.columns):
            interrupts.check()
            actions = [row[column] for row in schedule.rows.values()]
            doing = [action for action in actions if action is not None]
            if not reduced and any(action.stage_pass.is_update for action in doing):
                self._all_reduce(replicas)
                reduced = True
            steps = [loops.step(flush, each.micro_batch) for each in doing]
            for replica in replicas:
                for action, step in zip(doing, steps, strict=True):
                    at = loops.slice_of(step, replica.number)
                    replica.do(action, step, [of_input[at] for of_input in slices])
                replica.exchange()
            self._peers.deliver(replicas, list(zip(doing, steps, strict=True)))

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
        collector = Collector(program, Wanted(program))
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


def _readers(staged: Staged, after: StagePass) -> dict[tuple[Slot, int], list[int]]:
    """Return what leaves its process after a pass and for which one: chips that read it there."""
    readers: dict[tuple[Slot, int], list[int]] = {}
    for transfer in staged.transfers:
        target = staged.parts.get(transfer.target, 0)
        if transfer.source == after and target != staged.part_of(after):
            readers.setdefault((transfer.value, target), []).append(transfer.target)
    return readers


class Peers:
    """This process among those that share the stages of its replicas.

    After every column of the schedule all of them meet in one exchange of the values that others
    read. Schedules and shapes are the same everywhere, so that nobody has to be told what comes.
    """

    def __init__(self, staged: Staged, spec: Spec) -> None:
        self._staged = staged
        self._part, self._parts = spec.target.part, spec.target.parts
        first = spec.process - self._part
        self._members = range(first, first + self._parts)
        # Those that run the same chips of other replicas, which add up the same gradients.
        self._twins = range(self._part, spec.processes, self._parts)
        self._makers = staged.makers()
        self._readers = {each: _readers(staged, each) for each in staged.graphs}

    @property
    def chips(self) -> list[int]:
        own, parts = self._part, self._staged.parts
        return [chip for chip in self._staged.workload.chips if parts.get(chip, 0) == own]

    def check_alike(self, batch: Sequence[torch.Tensor]) -> None:
        if self._parts == 1:
            return
        own = 0
        for value in batch:
            own = zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy().data, own)
        sums = _job.current().numbers(own, "checksums of their batches")
        others = [i for i, other in enumerate(sums) if other != sums[i - i % self._parts]]
        if others:
            first = others[0] - others[0] % self._parts
            raise Error(
                "Processes that share the stages of a model were given different batches",
                got=f"process {others[0]} not that of process {first}",
                fix=(
                    "let poptorch.DataLoader shuffle, with the same options.randomSeed everywhere",
                    "seed what the data set draws alike in all processes",
                ),
            )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A call: when one process leaves it in the middle, no other can go on."""
        alone = self._parts == 1
        return contextlib.nullcontext() if alone else _job.current().unbroken(_VALUES)

    def deliver(self, replicas: Sequence[Replica], doing: Sequence[tuple[Action, int]]) -> None:
        if self._parts == 1:
            return
        sent: list[_job.Message] = []
        received: list[_job.Message] = []
        arrived: list[tuple[Replica, list[int], Name, torch.Tensor]] = []
        made = [(each.stage_pass, step) for each, step in doing if each.traffic is None]
        number = 0  # of a message, alike in all processes
        for (stage_pass, step), replica in itertools.product(made, replicas):
            source = self._staged.part_of(stage_pass)
            for (slot, target), chips in self._readers[stage_pass].items():
                name, number = (slot.key, step), number + 1
                if source == self._part:
                    value = replica.leaving[name].cpu().contiguous()
                    sent.append((value, self._members[target], number))
                elif target == self._part:
                    value = torch.empty(slot.shape, dtype=slot.dtype)
                    received.append((value, self._members[source], number))
                    arrived.append((replica, chips, name, value))
        _job.current().pass_on(sent, received, _VALUES)
        for replica, chips, name, value in arrived:
            replica.take_in(chips, name, value)
        for replica in replicas:
            replica.leaving.clear()

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        if len(self._twins) > 1:
            _job.current().all_reduce(totals, "the gradients of an update", self._twins)

    def is_maker(self, key: str) -> bool:
        return self._makers[key] == self._part

    def share(self, key: str, results: torch.Tensor) -> None:
        if self._parts > 1:
            source = self._members[self._makers[key]]
            _job.current().broadcast([results], _RESULTS, source, self._members)
