"""The processes of a job as one group: sums, copies, and errors that say who is missing.

All processes do the same exchanges in the same order; who waits looks for signs of life meanwhile.
Source: PyTorch documentation, "Distributed communication package".
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._base import interrupts, log
from .._base.errors import Error, StateError
from . import watch
from .beside import Beside
from .place import open_store
from .watch import Loss, Watch

MEETING = datetime.timedelta(minutes=10)
"""How long the first process waits for the last one to start."""
_NEVER = datetime.timedelta(days=365)  # torch's own limit: the signs of life are what counts
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
        StateError: this process is part of another group.
    """
    global _group
    if _group is None:
        _group = Group(index, count, patience)
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
        import torch.distributed as dist

        self.index, self.count = index, count
        self._lost: Error | None = None
        self._cause: Loss | None = None
        self._pending = False
        self._told = 0  # the number of the exchange in which this process wrote a text
        self._some: dict[tuple[int, ...], Any] = {}  # torch's groups of some of the processes
        store = open_store(index, count, MEETING)
        self._store = store
        own = not dist.is_initialized()
        if own:
            dist.init_process_group(
                "gloo", store=store, rank=index, world_size=count, timeout=_NEVER
            )
        if (dist.get_rank(), dist.get_world_size()) != (index, count):
            raise StateError(
                "torch.distributed was initialised for another place in the job",
                got=f"process {dist.get_rank()} of {dist.get_world_size()} there, "
                f"{index} of {count} in options.Distributed",
            )
        self._pg = dist.group.WORLD if own else dist.new_group(backend="gloo", timeout=_NEVER)
        self._watch = Watch(store.clone(), index, count, patience)
        self._ended = ""
        _note_failures(self)
        atexit.register(self._leave)
        log.python.info("Process %d of %d: all have met", index, count)

    # Exchanges. All processes call them in the same order.

    def add_up(
        self, tensors: Sequence[torch.Tensor], what: str, members: Sequence[int] = ()
    ) -> None:
        """Replace tensors by their sums over all processes, or over some.

        Args:
            tensors: contiguous, alike in these processes.
            what: is exchanged, for messages.
            members: the processes, this one among them; the others add other tensors up meanwhile.

        Raises:
            Error: a process is lost.
        """
        import torch.distributed as dist

        with self._exchange(what):
            group = self._among(members)
            works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
            self._wait(works, what)

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
            group = self._among(members)
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
            works = [dist.irecv(t, other, self._pg, tag=number) for t, other, number in received]
            works += [dist.isend(t, other, self._pg, tag=number) for t, other, number in sent]
            if works:
                self._wait([Beside(works)], what)

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

    def compare(self, facts: Mapping[str, str], what: str) -> dict[int, dict[str, str]]:
        """Return the facts of the processes whose facts are not those of process 0, and its own.

        Args:
            facts: of this process; only a digest travels where all agree.
            what: is compared, for messages.

        Returns:
            Nothing if all agree.
        """
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        digests = self.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), what)
        others = [i for i, other in enumerate(digests) if not torch.equal(other, digests[0])]
        if not others:
            return {}
        if self.index in (0, *others):
            self._store.set(f"facts/{self.index}", text)
        self.numbers(0, what)  # until all have written
        return {i: json.loads(self._store.get(f"facts/{i}")) for i in (0, *others)}

    def texts(self, text: str, what: str) -> list[str]:
        """Return a text of every process.

        It goes through the store: gloo would take what another process exchanges instead for it,
        and end this one.

        Raises:
            Error: a process is lost, or does something else.
        """
        with self._exchange(what):
            number = self._watch.doing[0]
            self._store.set(f"text/{number}/{self.index}", text)
            keys = [f"text/{number}/{index}" for index in range(self.count)]
            pause, looked = 1e-4, time.monotonic()
            while not self._store.check(keys):
                interrupts.check()
                if time.monotonic() - looked > watch.BEAT:
                    looked = time.monotonic()
                    loss = self._watch.look()
                    if loss is not None:
                        self._pending = True
                        raise self._loss(loss, what)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            texts = [self._store.get(key).decode() for key in keys]
        if self._told:  # all have read their last text, or they would not have written this one
            self._store.delete_key(f"text/{self._told}/{self.index}")
        self._told = number
        return texts

    # Waiting.

    def _among(self, members: Sequence[int]) -> Any:
        """Torch's group of some of the processes; of all if none are named."""
        import torch.distributed as dist

        if not members or len(members) == self.count:
            return self._pg
        key = tuple(members)
        if key not in self._some:
            self._some[key] = dist.new_group(
                key, backend="gloo", timeout=_NEVER, use_local_synchronization=True
            )
        return self._some[key]

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        with self.unbroken(what):
            self._watch.doing = (self._watch.doing[0] + 1, what)
            yield

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
        began, said = time.monotonic(), watch.IMPATIENT
        for work in works:
            while not self._is_done(work, what):
                interrupts.check()
                loss = self._watch.look()
                if loss is not None:
                    self._pending = True
                    raise self._loss(loss, what)
                waited = time.monotonic() - began
                slow = self._watch.slow()
                if waited > said and slow:
                    said *= 2
                    names = ", ".join(map(str, slow))
                    log.python.warning(
                        "Process %d has waited %.0f s for process %s, to exchange %s",
                        self.index,
                        waited,
                        names,
                        what,
                    )

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
            raise self._loss(loss or Loss(-1, str(error).splitlines()[0]), what) from error

    def _loss(self, loss: Loss, what: str) -> Error:
        who = f"process {loss.index} of {self.count}" if loss.index >= 0 else "the network"
        self._cause = loss
        self._lost = Error(
            f"Process {loss.index} of the job is lost"
            if loss.index >= 0
            else "The connection between the processes of the job is lost",
            got=f"{who}: {loss.why}; process {self.index} waited for it to exchange {what}",
            fix=(
                "its own output says more",
                "poprun --max-restarts n starts all processes again, from what the script saved",
            ),
        )
        return self._lost

    # The end.

    def note(self, error: BaseException) -> None:
        """The process ends by an exception that nobody caught."""
        first = next(iter(str(error).splitlines()), "")
        self._ended = f"it ended by {type(error).__name__}: {first}"

    def _leave(self) -> None:
        self._watch.stop(self._ended or "it has ended", self._cause)
        if self._pending:
            # torch's destructor would wait for an exchange that nobody answers.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


def _note_failures(group: Group) -> None:
    """Let the others know by which exception this process ends."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        group.note(error)
        before(kind, error, traceback)

    sys.excepthook = hook
