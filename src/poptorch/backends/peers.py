"""Exchange values between the processes that share the stages of a model.

A value is sent as soon as it is computed, and waited for when it is read. A process only waits for
what other processes do in earlier columns of the schedule, so the process that is furthest behind
can always continue.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import _job
from .._base.errors import Error
from .._ir.block_labels import StagePass
from .._ir.plan import Staged, values_read
from .._ir.schedule import Action
from .._ir.slots import Slot
from .._ir.spec import Spec
from .chips import Name, Replica

_VALUES = "the tensors that stages exchange"
_RESULTS = "the results of a call"
# A value can only leave its process when there is a buffer for it. The buffer exists this number of
# columns before the value: a process that is behind by fewer columns delays nobody.
_AHEAD = 2
_TOGETHER = 4  # number of messages to wait for at once, because a wait takes 0.2 ms


class SentValue(NamedTuple):
    """A value of one micro-batch that is sent to another process."""

    slot: Slot
    maker: Action
    source: int  # index of the sending process in this model
    target: int
    chips: list[int]  # chips that read the value in the other process
    made: int  # column of the schedule
    read: int


def transits(staged: Staged) -> list[SentValue]:
    """Return all values that are sent between processes, in the order in which they are
    computed.
    """
    streaming, reads = staged.workload.streaming, defaultdict[tuple[str, int, int], list[int]](list)
    keys = {
        each: {*values_read(graph), *streaming.loads.get(each, ()), *streaming.stores.get(each, ())}
        for each, graph in staged.graphs.items()
    }
    for column, chip, action in staged.schedule.cells():
        for key in keys[action.stage_pass]:
            reads[key, chip, action.micro_batch].append(column)
    readers = {each: _readers(staged, each) for each in staged.graphs}
    found = []
    for made, _, maker in staged.schedule.cells():
        if maker.traffic is None:
            source = staged.part_of(maker.stage_pass)
            for (slot, target), chips in readers[maker.stage_pass].items():
                columns = [at for chip in chips for at in reads[slot.key, chip, maker.micro_batch]]
                read = min(column for column in columns if column > made)
                found.append(SentValue(slot, maker, source, target, chips, made, read))
    return found


def _readers(staged: Staged, after: StagePass) -> dict[tuple[Slot, int], list[int]]:
    """Return the values that leave their process after a pass, and the chips that read them."""
    readers: dict[tuple[Slot, int], list[int]] = {}
    for transfer in staged.transfers:
        target = staged.parts[transfer.target]
        if transfer.source == after and target != staged.part_of(after):
            readers.setdefault((transfer.value, target), []).append(transfer.target)
    return readers


class Peers:
    """This process among the others. Schedules and shapes are the same in all of them."""

    def __init__(self, staged: Staged, spec: Spec) -> None:
        self._staged = staged
        self.part, self._parts = spec.target.part, spec.target.parts
        first = spec.process - self.part
        self.members = range(first, first + self._parts)
        # The processes that run the same chips of other replicas, and sum the same gradients.
        self._twins = range(self.part, spec.processes, self._parts)
        self._makers = staged.makers()
        self.numbered = list(enumerate(transits(staged) if self._parts > 1 else ()))

    @property
    def chips(self) -> list[int]:
        own, parts = self.part, self._staged.parts
        return [chip for chip in self._staged.workload.chips if parts[chip] == own]

    def check_inputs_agree(self, batch: Sequence[torch.Tensor]) -> None:
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
                "Processes that run stages of the same model received different batches",
                got=(
                    f"process {others[0]} received a batch that differs from that of process "
                    f"{first}"
                ),
                fix=(
                    (
                        "shuffle with poptorch.DataLoader, with the same options.randomSeed in "
                        "all processes"
                    ),
                    "if the data set draws random numbers, use the same seed in all processes",
                ),
            )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Run a call. If one process fails in the middle, no other can continue."""
        alone = self._parts == 1
        return contextlib.nullcontext() if alone else _job.current().unbroken(_VALUES)

    def exchange(self) -> contextlib.AbstractContextManager[None]:
        """Run a part of the schedule in which all processes take part."""
        alone = self._parts == 1
        return contextlib.nullcontext() if alone else _job.current().exchange(_VALUES)

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        if len(self._twins) > 1:
            _job.current().all_reduce(totals, "the gradients of an update", self._twins)

    def is_maker(self, key: str) -> bool:
        return self._makers[key] == self.part

    def share(self, key: str, results: torch.Tensor) -> None:
        if self._parts > 1:
            source = self.members[self._makers[key]]
            _job.current().broadcast([results], _RESULTS, source, self.members)


@dataclass(eq=False)
class _Message:
    transit: SentValue
    replica: Replica
    value: torch.Tensor  # must not be freed or written before the transfer ends
    other: int  # the other process
    work: Any


class MessagesOfRun:
    """The messages to and from other processes in one run of the schedule."""

    def __init__(
        self, peers: Peers, replicas: Sequence[Replica], step: Callable[[int], int]
    ) -> None:
        self._members, self._replicas, self._step = peers.members, replicas, step
        self._expected = deque(each for each in peers.numbered if each[1].target == peers.part)
        self._made = defaultdict[Action, list[tuple[int, SentValue]]](list)
        for number, transit in peers.numbered:
            if transit.source == peers.part:
                self._made[transit.maker].append((number, transit))
        self._coming: list[_Message] = []
        self._going: list[_Message] = []

    def begin(self, column: int) -> None:
        """Allocate buffers for values that are computed soon, and release those that
        others have read.
        """
        while self._expected and self._expected[0][1].made <= column + _AHEAD:
            number, transit = self._expected.popleft()
            other = self._members[transit.source]
            for replica in self._replicas:
                value = torch.empty(transit.slot.shape, dtype=transit.slot.dtype)
                work = _job.current().receive(value, other, self._tag(number, replica))
                self._coming.append(_Message(transit, replica, value, other, work))
        gone = [message for message in self._going if message.transit.read < column]
        if len(gone) >= _TOGETHER:
            self._release(gone)

    def receive_due(self, column: int, replica: Replica) -> None:
        """Wait for the values that a replica reads in a column."""
        due = [m for m in self._coming if m.transit.read <= column and m.replica is replica]
        for message in due:
            _job.current().received(message.work, _VALUES, message.other)
            self._coming.remove(message)
            replica.deliver(
                message.transit.chips, self._name(message.transit), message.value, own=True
            )

    def deliver(self, action: Action, replica: Replica) -> None:
        """Send what an action has computed."""
        for number, transit in self._made[action]:
            other, value = self._members[transit.target], replica.leaving[self._name(transit)]
            work = _job.current().send(value, other, self._tag(number, replica))
            self._going.append(_Message(transit, replica, value, other, work))
        replica.leaving.clear()

    def end(self) -> None:
        """Wait until everything was sent."""
        self._release([*self._going])

    def _release(self, messages: Sequence[_Message]) -> None:
        by_process = defaultdict[int, list[Any]](list)
        for message in messages:
            by_process[message.other].append(message.work)
        for other, works in by_process.items():
            _job.current().sent(works, _VALUES, other)
        self._going = [message for message in self._going if message not in messages]

    def _name(self, transit: SentValue) -> Name:
        return transit.slot.key, self._step(transit.maker.micro_batch)

    def _tag(self, number: int, replica: Replica) -> int:
        return number * len(self._replicas) + replica.number
