"""The processes of a job as one group: sums, copies, and errors that say who is missing.

All processes do the same exchanges in the same order; who waits looks for signs of life meanwhile.
Source: PyTorch documentation, "Distributed communication package".
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._base import interrupts, log
from .._base.errors import Error, StateError
from . import watch
from .beside import Beside
from .connecting import added, check_place, connect_all, connect_some
from .notes import Notes
from .patience import Patience
from .place import keeper, open_store
from .watch import Loss, Watch

MEETING = datetime.timedelta(minutes=10)
"""How long the first process waits for the last one to start."""
_SLICE = datetime.timedelta(seconds=watch.BEAT)

_group: Group | None = None

Message = tuple[torch.Tensor, int, int]
"""A contiguous tensor, the process at its other end, and a number that both ends know it by."""


def join(index: int, count: int, patience: float) -> Group:
    """Meet the other processes, or return the group if that has been done.

    Args:
        index, count: which process this is, of how many.
        patience: seconds without a sign of life after which a process counts as lost.

    Raises:
        Error: they do not meet.
        StateError: this process is part of another group, or torch was told of another place.
    """
    global _group
    if _group is None:
        check_place(index, count)
        _group = Group(index, count, patience)
        _group.connect()
    elif (_group.index, _group.count) != (index, count):
        raise StateError(
            "A process is part of one job only",
            got=f"process {index} of {count}; it has joined as {_group.index} of {_group.count}",
            fix="give all options of a script the same Distributed.configureProcessId",
        )
    return _group


def current() -> Group:
    """Return the group that this process has joined."""
    assert _group is not None, "a program of several processes runs before they have met"
    return _group


class Group:
    """This process among those of its job.

    Attributes:
        index: which it is.
        count: how many there are.
    """

    def __init__(self, index: int, count: int, patience: float) -> None:
        self.index, self.count = index, count
        self._lost: Error | None = None
        self._cause: Loss | None = None
        self._pending = False
        self._ended = ""
        self._some: dict[tuple[int, ...], Any] = {}  # torch's groups of some of the processes
        self._store = open_store(index, count, MEETING)
        self._notes = Notes(self._store, index, count)
        self._watch = Watch(self._store, index, count, patience, keeper())
        self._owner = os.getpid()
        _note_failures(self)

    def connect(self) -> None:
        """Let torch connect the processes, which have met.

        Raises:
            Error: a process is lost.
        """
        self._pg = self._beside(
            lambda: connect_all(self._store, self.index, self.count), "their addresses"
        )
        log.python.info("Process %d of %d: all have met", self.index, self.count)

    # Exchanges. All processes call them in the same order.

    def add_up(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        members: Sequence[int] = (),
        begun: Sequence[Any] = (),
    ) -> None:
        """Replace tensors by their sums over all processes, or over some.

        Args:
            tensors: contiguous, alike in these processes.
            what: is exchanged, for messages.
            members: the processes, this one among them; the others add other tensors up meanwhile.
            begun: what ``begin`` returned, which has ended then.

        Raises:
            Error: a process is lost.
        """
        with self._exchange(what):
            works = added(self._among(members, what), tensors)
            self._wait([*begun, *works], what)

    def begin(self, tensors: Sequence[torch.Tensor], what: str) -> list[Any]:
        """Let all processes add tensors up meanwhile; nobody writes to them until that has ended.

        Args:
            tensors, what: as of ``add_up``.

        Returns:
            What ``add_up`` or ``finish`` waits for.

        Raises:
            Error: a process is lost.
        """
        with self.unbroken(what):
            return added(self._pg, tensors)

    def finish(self, begun: Sequence[Any], what: str) -> None:
        """Wait for what was begun, unless the job is lost.

        Raises:
            Error: a process is lost meanwhile.
        """
        if self._lost is None:
            with self.unbroken(what):
                self._wait(begun, what)

    def put_together(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Fill flat tensors with the parts that the processes have, in their order.

        Args:
            tensors: each as long for every process; this one's part of it is in its place.
            what: is exchanged, for messages.

        Raises:
            Error: a process is lost.
        """
        import torch.distributed as dist

        # gloo's own gathering copies all of it once more: 64 MB between two processes take it
        # 268 ms, and these 72.
        with self._exchange(what):
            parts = [enumerate(each.chunk(self.count)) for each in tensors]
            works = [
                dist.broadcast(part, source, group=self._pg, async_op=True)
                for of_one in parts
                for source, part in of_one
            ]
            self._wait(works, what)

    def hand_round(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        source: int = 0,
        members: Sequence[int] = (),
    ) -> None:
        """Replace tensors by those of one process.

        Args:
            tensors: alike in the processes.
            what: is exchanged, for messages.
            source: which process.
            members: the processes that take part, as in ``add_up``.

        Raises:
            Error: a process is lost.
        """
        import torch.distributed as dist

        with self._exchange(what):
            group = self._among(members, what)
            for tensor in tensors:
                flat = tensor if tensor.is_contiguous() else tensor.contiguous()
                self._wait([dist.broadcast(flat, source, group=group, async_op=True)], what)
                if flat is not tensor:
                    tensor.copy_(flat)

    def pass_on(self, sent: Sequence[Message], received: Sequence[Message], what: str) -> None:
        """Send tensors to single processes and wait for theirs.

        Processes that have nothing to send or to wait for call this too: it counts as an exchange.

        Args:
            sent: go to these processes.
            received: are filled by what comes from these.
            what: is exchanged, for messages.

        Raises:
            Error: a process is lost.
        """
        import torch.distributed as dist

        with self._exchange(what):
            works: list[Any] = [
                dist.irecv(t, other, self._pg, tag=number) for t, other, number in received
            ]
            works += [dist.isend(t, other, self._pg, tag=number) for t, other, number in sent]
            if works:
                self._wait([Beside(lambda: [work.wait() for work in works])], what)

    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the tensors of all processes, in their order.

        Raises:
            Error: a process is lost.
        """
        import torch.distributed as dist

        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        with self._exchange(what):
            self._wait([dist.all_gather(parts, tensor, group=self._pg, async_op=True)], what)
        return parts

    def numbers(self, value: int, what: str) -> list[int]:
        """Return an integer of every process."""
        return [int(part) for part in self.gather(torch.tensor([value]), what)]

    def texts(self, text: str, what: str) -> list[str]:
        """Return a text of every process.

        Raises:
            Error: a process is lost, or does something else.
        """
        texts: list[str] = self._beside(
            lambda: self._notes.exchange(
                self._watch.doing[0], text, lambda: self._lost is not None
            ),
            what,
        )
        return texts

    # Waiting.

    def _among(self, members: Sequence[int], what: str) -> Any:
        """Torch's group of some of the processes; of all if none are named."""
        if not members or len(members) == self.count:
            return self._pg
        key = tuple(members)
        if key not in self._some:
            making = Beside(lambda: connect_some(key))
            self._wait([making], what)
            self._some[key] = making.result
        return self._some[key]

    def _beside(self, do: Callable[[], Any], what: str) -> Any:
        """Return what comes of an exchange that a thread makes."""
        with self._exchange(what):
            doing = Beside(do)
            self._wait([doing], what)
        return doing.result

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        with self.unbroken(what):
            self._watch.begin(what)
            yield
            self._watch.done += 1

    @contextlib.contextmanager
    def unbroken(self, what: str) -> Iterator[None]:
        """What is left in the middle cannot be taken up again: the group is of no use then.

        Args:
            what: is exchanged in the block, for messages.

        Raises:
            Error: a process is lost, or an exchange was interrupted, before.
        """
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except BaseException as error:
            if self._lost is None:
                self._lost = StateError(
                    "The job cannot go on: an exchange between its processes was interrupted",
                    got=f"{type(error).__name__} while they exchanged {what}",
                )
                self._pending = True
                self._watch.stop(f"its part was interrupted by {type(error).__name__}", None)
            raise

    def _wait(self, works: Sequence[Any], what: str) -> None:
        patience = Patience(self.index)
        for work in works:
            while not self._is_done(work, what):
                interrupts.check()
                loss = self._watch.look()
                if loss is not None:
                    self._pending = True
                    raise self._loss(loss, what)
                slow = ", ".join(map(str, self._watch.slow()))
                patience.say(f"process {slow}" if slow else "", f"exchange {what}")

    def _is_done(self, work: Any, what: str) -> bool:
        """Wait a moment; False if the others are not ready."""
        try:
            work.wait(_SLICE)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # it may have ended well after the moment was over
            return True
        except RuntimeError as error:
            loss = self._watch.blame()
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._loss(loss or Loss(-1, f"the network: {first}"), what) from error

    def _loss(self, loss: Loss, what: str) -> Error:
        self._cause = loss
        if loss.index < 0:
            title = "The connection between the processes of the job is lost"
            who = loss.why
        else:
            title = f"Process {loss.index} of the job is lost"
            who = f"process {loss.index} of {self.count}: {loss.why}"
        self._lost = Error(
            title,
            got=f"{who}; process {self.index} waited for it to exchange {what}",
            fix=(
                "its own output says more; all make the same calls, and as many",
                "poprun --max-restarts n starts all processes again, from what the script saved",
            ),
        )
        return self._lost

    # The end.

    def note(self, error: BaseException) -> None:
        """The process ends by an exception that nobody caught."""
        first = next(iter(str(error).splitlines()), "")
        self._ended = f"it ended by {type(error).__name__}: {first}"

    def leave(self) -> None:
        """The process ends; a fork of it is no part of the job."""
        if os.getpid() != self._owner:
            return
        self._watch.stop(self._ended or "it has ended", self._cause)
        self._watch.see_off()
        if self._pending:
            # torch's destructor would wait for an exchange that nobody answers.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


@atexit.register  # now, so that it comes after all that is registered later: it may be the end
def _leave() -> None:
    if _group is not None:
        _group.leave()


def _note_failures(group: Group) -> None:
    """Let the others know by which exception this process ends."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        group.note(error)
        before(kind, error, traceback)

    sys.excepthook = hook
