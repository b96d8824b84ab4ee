"""The processes that share the stages of a replica: what they send one another, and to all.

Each does the actions of its own chips. After every column of the schedule all of them meet in one
exchange, in which whoever made a value sends it to the processes whose chips read it. Schedules and
shapes are the same everywhere, so that nobody has to be told what comes.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import _job
from .._base.errors import Error
from .._ir.blocks import StagePass
from .._ir.plan import Staged
from .._ir.schedule import Action
from .._ir.slots import Slot
from .._ir.spec import Spec
from .chips import Name, Replica

_VALUES = "what stages hand to one another"
_RESULTS = "the results of a call"


@dataclass(frozen=True)
class _Letter:
    """A value on its way: from a part, to the chips of another that read it."""

    value: Slot
    source: int
    target: int
    chips: tuple[int, ...]


def _letters(staged: Staged, after: StagePass) -> list[_Letter]:
    """What leaves its process after a pass, once for each process that reads it."""
    source = staged.part_of(after)
    readers: dict[tuple[Slot, int], list[int]] = {}
    for transfer in staged.transfers:
        target = staged.parts.get(transfer.target, 0)
        if transfer.source == after and target != source:
            readers.setdefault((transfer.value, target), []).append(transfer.target)
    return [_Letter(slot, source, to, tuple(chips)) for (slot, to), chips in readers.items()]


class Crew:
    """This process among those that share the stages of its replicas.

    Args:
        staged: what they run together.
        spec: the settings.
    """

    def __init__(self, staged: Staged, spec: Spec) -> None:
        self._staged = staged
        self._part, self._parts = spec.target.part, spec.target.parts
        first = spec.process - self._part
        self._members = range(first, first + self._parts)
        # Those that run the same chips of other replicas, which add up the same gradients.
        self._twins = range(self._part, spec.processes, self._parts)
        self._makers = staged.makers()
        self._letters = {each: _letters(staged, each) for each in staged.graphs}

    @property
    def chips(self) -> list[int]:
        """The chips that this process runs."""
        own, parts = self._part, self._staged.parts
        return [chip for chip in self._staged.workload.chips if parts.get(chip, 0) == own]

    def check_alike(self, batch: Sequence[torch.Tensor]) -> None:
        """Compare what the processes are given; the stages of one read the same.

        Raises:
            Error: it is not the same; it is raised in every process.
        """
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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A call: when one process leaves it in the middle, no other can go on."""
        if self._parts == 1:
            yield
            return
        with _job.current().unbroken(_VALUES):
            yield

    def deliver(self, replicas: Sequence[Replica], doing: Sequence[tuple[Action, int]]) -> None:
        """Send and receive what the actions of a column made.

        Args:
            replicas: of this process.
            doing: the actions, of all chips, with their steps.
        """
        if self._parts == 1:
            return
        sent: list[_job.Message] = []
        received: list[_job.Message] = []
        arrived: list[tuple[Replica, tuple[int, ...], Name, torch.Tensor]] = []
        letters = [
            (letter, (letter.value.key, step), replica)
            for action, step in doing
            if action.traffic is None
            for letter in self._letters[action.stage_pass]
            for replica in replicas
        ]
        for number, (letter, name, replica) in enumerate(letters):  # alike in all processes
            if letter.source == self._part:
                value = replica.leaving[name].cpu().contiguous()
                sent.append((value, self._members[letter.target], number))
            elif letter.target == self._part:
                value = torch.empty(letter.value.shape, dtype=letter.value.dtype)
                received.append((value, self._members[letter.source], number))
                arrived.append((replica, letter.chips, name, value))
        _job.current().pass_on(sent, received, _VALUES)
        for replica, chips, name, value in arrived:
            replica.take_in(chips, name, value)
        for replica in replicas:
            replica.leaving.clear()

    def add_up(self, totals: Sequence[torch.Tensor]) -> None:
        """Replace sums of gradients by those of all processes with the same chips."""
        if len(self._twins) > 1:
            _job.current().add_up(totals, "the gradients of an update", self._twins)

    def is_maker(self, key: str) -> bool:
        """Tell whether this process makes a result."""
        return self._makers[key] == self._part

    def share(self, key: str, results: torch.Tensor) -> None:
        """Give all that share the stages what one of them has made, in place."""
        if self._parts > 1:
            source = self._members[self._makers[key]]
            _job.current().hand_round([results], _RESULTS, source, self._members)
