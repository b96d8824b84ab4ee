"""Make the exchanges of a job: sums, copies and comparisons between its processes, over gloo or in
shared memory. All processes make the same ones in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._base import interrupts, log, terminal
from .._base.errors import Error, StateError
from . import heartbeat
from .heartbeat import Heartbeat, LostProcess
from .rendezvous import Impatience, Line, open_store
from .shared_memory import CommonMemory, Regions, add_up

dist = torch.distributed  # torch itself has imported it
MEETING = datetime.timedelta(minutes=10)  # from the start of the first process to that of the last
_SLICE = datetime.timedelta(seconds=heartbeat.INTERVAL)
_NEVER = datetime.timedelta(days=365)  # torch's limit is disabled, because the heartbeats decide
_ENOUGH = 0.01  # seconds of a sum that is long enough to measure the network
_LONGEST_PAUSE = 0.05  # seconds between two checks for texts

_group: ProcessGroup | None = None


def join(index: int, count: int, patience: float) -> ProcessGroup:
    """Connect to the other processes, unless this process is already connected. A process counts as
    lost after ``patience`` seconds without a heartbeat.
    """
    global _group
    if _group is None:
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (index, count):
            raise StateError(
                "torch.distributed was initialised with another rank or world size",
                got=(
                    f"rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed, "
                    f"and {index} of {count} in options.Distributed"
                ),
                fix=(
                    "call options.Distributed.configureProcessId(rank, world_size) with the values "
                    "of torch.distributed"
                ),
            )
        _group = ProcessGroup(index, count, patience)
        _group.connect()
    elif (_group.index, _group.count) != (index, count):
        raise StateError(
            "A process can be part of only one job",
            got=(
                f"process {index} of {count}; the process already joined the job as "
                f"{_group.index} of {_group.count}"
            ),
            fix=(
                "pass the same arguments to options.Distributed.configureProcessId for all options "
                "of a script"
            ),
        )
    return _group


def current() -> ProcessGroup:
    assert _group is not None, "a program of several processes runs before they have met"
    return _group


class ProcessGroup:
    """The processes that train together. If one is lost, exchanges raise an Error that contains
    ``what``.
    """

    def __init__(self, index: int, count: int, patience: float) -> None:
        self.index, self.count = index, count
        self._pg: Any = None
        self._lost: Error | None = None
        self._cause: LostProcess | None = None
        self._pending = False
        self._opened_default = False  # torch's default group
        self._some: dict[tuple[int, ...], Any] = {}  # torch's groups of some of the processes
        self.memory = CommonMemory()
        meeting = open_store(index, count, MEETING)
        self._store, self._torchs, self._leave_place = meeting.store, meeting.torchs, meeting.leave
        self._texts_written = 0  # the exchange of this process's last text
        self._timings: tuple[float, float, float] | None = None
        self._heartbeat = Heartbeat(self._store, index, count, patience, meeting.owner)
        self._owner = os.getpid()
        self._line, self._arriving = Line(), Line()

    def connect(self) -> None:
        """Connect the processes. Torch's default group belongs to the script, and is not used."""

        def connect_all() -> Any:
            if not dist.is_initialized():
                store, self._opened_default = self._torchs, True
                dist.init_process_group("gloo", store=store, rank=self.index, world_size=self.count)
            return dist.new_group(backend="gloo", timeout=_NEVER)

        with self.exchange("their addresses"):
            self._pg = self._outcome(connect_all, "their addresses")
        self._torchs = None  # it ends with torch's groups
        log.python.info("Process %d of %d: all have met", self.index, self.count)

    # Exchanges. All processes call them in the same order.

    def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        members: Sequence[int] = (),
        begun: Sequence[Any] = (),
    ) -> None:
        """Sum contiguous tensors in place over all processes or the members; wait for ``begun``."""
        regions = self._regions(tensors) if len(members) in (0, self.count) else []
        with self.exchange(what):
            if not regions:
                works = _added(self._among(members, what), tensors)
                self._wait([*begun, *works], what)
                return
            self._wait([*begun, self._barrier()], what)  # all have written what is to be summed
            for of_one in regions:
                add_up(of_one, self.index)
            self._wait([self._barrier()], what)

    def _barrier(self) -> Any:
        """Start an operation that ends when all processes have started it."""
        return self._pg.barrier()

    def _regions(self, tensors: Sequence[torch.Tensor]) -> list[Regions]:
        """Return where the processes on one machine have these tensors; empty with several
        machines.
        """
        names, what = self.memory.names(tensors), "the places of their sums"
        regions = self.memory.regions(tensors) if names else []
        if regions is None:
            everyones = [json.loads(text) for text in self.texts(json.dumps(names), what)]
            found = self.memory.find(tensors, everyones)
            regions = found if all(self.numbers(len(found), what)) else []
            self.memory.keep(tensors, regions)
        return regions if all(regions) else []

    def begin(self, tensors: Sequence[torch.Tensor], what: str) -> list[Any]:
        """Start a sum, for which ``all_reduce`` or ``finish`` waits. Nobody may write to the
        tensors until then.
        """
        with self.unbroken(what):
            return _added(self._pg, tensors)

    def finish(self, begun: Sequence[Any], what: str) -> None:
        if self._lost is None:
            with self.unbroken(what):
                self._wait(begun, what)

    def all_gather(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Fill flat tensors with the equal parts of all processes. Each has its own part
        in place.
        """
        # gloo's own operation copies once more: it sends 64 MB to another process in 268 ms, and
        # this code in 72 ms.
        with self.exchange(what):
            parts = [enumerate(each.chunk(self.count)) for each in tensors]
            works = [
                dist.broadcast(part, source, group=self._pg, async_op=True)
                for of_one in parts
                for source, part in of_one
            ]
            self._wait(works, what)

    def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        what: str,
        source: int = 0,
        members: Sequence[int] = (),
    ) -> None:
        with self.exchange(what):
            group = self._among(members, what)
            for tensor in tensors:
                flat = tensor if tensor.is_contiguous() else tensor.contiguous()
                self._wait([dist.broadcast(flat, source, group=group, async_op=True)], what)
                if flat is not tensor:
                    tensor.copy_(flat)

    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        with self.exchange(what):
            self._wait([dist.all_gather(parts, tensor, group=self._pg, async_op=True)], what)
        return parts

    def numbers(self, value: int, what: str) -> list[int]:
        return [int(part) for part in self.gather(torch.tensor([value]), what)]

    def timings(self) -> tuple[float, float, float]:
        """Return measurements of process 0: seconds of a tiny sum, and bytes and seconds of a
        larger one.

        The larger one grows until it takes long enough, because some links transfer a little
        immediately.
        """
        if self._timings is None:
            self._timed(1)  # opens the connections
            tiny, count = self._timed(1), self.count << 14
            while (seconds := self._timed(count)) < _ENOUGH and count < self.count << 20:
                count *= 4
            self._timings = tiny, 4.0 * count, seconds
        return self._timings

    def _timed(self, count: int) -> float:
        what, numbers, times = "sums that measure what joins them", torch.zeros(count), []
        for _ in range(3):
            began = time.perf_counter()
            self.all_reduce([numbers], what)
            times.append(time.perf_counter() - began)
        return self.numbers(int(1e9 * sorted(times)[1]), what)[0] / 1e9

    def texts(self, text: str, what: str) -> list[str]:
        """Return the text of each process, over the store, because gloo could receive bytes of
        another exchange.
        """

        def exchange() -> list[str]:
            number = self._heartbeat.doing[0]
            self._store.set(f"text/{number}/{self.index}", text)
            keys = [f"text/{number}/{index}" for index in range(self.count)]
            pause = 1e-4
            while not self._store.check(keys):
                if self._lost is not None:
                    return []
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            texts = [self._store.get(key).decode() for key in keys]
            # all have read their last text, because otherwise they would not have reached this
            # point
            if self._texts_written:
                self._store.delete_key(f"text/{self._texts_written}/{self.index}")
            self._texts_written = number
            return texts

        with self.exchange(what):
            texts: list[str] = self._outcome(exchange, what)
        return texts

    # Messages: contiguous tensors between two processes, which both identify by a number.

    def send(self, tensor: torch.Tensor, to: int, number: int) -> Any:
        """Start to send tensors, which nobody may write to before ``complete`` has waited."""
        return self._pg.send([tensor], to, number)

    def receive(self, tensor: torch.Tensor, source: int, number: int) -> Any:
        """Start to receive what the other process sends, now or later, but in this order."""
        return self._arriving.put(self._pg.recv([tensor], source, number).wait)

    def sent(self, messages: Sequence[Any], what: str, other: int) -> None:
        """Wait until messages to another process were sent. This is part of an ``exchange``."""
        with self.unbroken(what):
            self._outcome(lambda: [each.wait() for each in messages], what, other)

    def received(self, message: Any, what: str, other: int) -> None:
        """Wait for a message from another process. This is part of an ``exchange``."""
        with self.unbroken(what):
            self._wait([message], what, other)

    def _among(self, members: Sequence[int], what: str) -> Any:
        if not members or len(members) == self.count:
            return self._pg
        key = tuple(members)
        if key not in self._some:
            make = functools.partial(dist.new_group, use_local_synchronization=True)
            self._some[key] = self._outcome(lambda: make([*key], _NEVER, "gloo"), what)
        return self._some[key]

    def _outcome(self, do: Callable[[], Any], what: str, whom: int | None = None) -> Any:
        doing = self._line.put(do)
        self._wait([doing], what, whom)
        return doing.result()

    @contextlib.contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        """Run something that all processes do, the same number of times and in the same order."""
        with self.unbroken(what):
            self._heartbeat.begin(what)
            yield
            self._heartbeat.done += 1

    @contextlib.contextmanager
    def unbroken(self, what: str) -> Iterator[None]:
        """Run something that cannot be resumed if it is interrupted: the group is unusable then."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except BaseException as error:
            if self._lost is None:
                self._lost = StateError(
                    (
                        "The job cannot continue: a communication between its processes was "
                        "interrupted"
                    ),
                    got=f"{type(error).__name__} while they exchanged {what}",
                    fix="start all processes of the job again",
                )
                self._pending = True
                self._heartbeat.stop(
                    f"the operation of this process was interrupted by {type(error).__name__}",
                    None,
                )
            raise

    def _wait(self, works: Sequence[Any], what: str, whom: int | None = None) -> None:
        impatience = Impatience(self.index)
        for work in works:
            while not self._is_done(work, what):
                interrupts.check()
                loss = self._heartbeat.find_loss()
                if loss is not None:
                    self._pending = True
                    raise self._loss(loss, what)
                slow = ", ".join(map(str, self._heartbeat.slow() if whom is None else [whom]))
                impatience.warn(f"process {slow}" if slow else "", f"exchange {what}")

    def _is_done(self, work: Any, what: str) -> bool:
        try:
            work.wait(_SLICE)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # it may have ended long after the timeout
            return True
        except RuntimeError as error:
            loss = self._heartbeat.blame()
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._loss(loss or LostProcess(-1, f"the network: {first}"), what) from error

    def _loss(self, loss: LostProcess, what: str) -> Error:
        self._cause = loss
        if loss.process < 0:
            title = "The connection between the processes of the job is lost"
            who, advice = loss.why, "read the output of the other processes"
        else:
            title = f"Process {loss.process} of the job is lost"
            who = f"process {loss.process} of {self.count}: {loss.why}"
            advice = "read the output of that process"
        self._lost = Error(
            title,
            got=f"{who}; process {self.index} was waiting to exchange {what}",
            fix=(
                advice,
                "check that all processes make the same calls, the same number of times",
                "to restart all processes from the last checkpoint: poprun --max-restarts n",
            ),
        )
        return self._lost

    def leave(self) -> None:
        """Leave the job when the process ends. A forked copy is not part of the job."""
        if os.getpid() != self._owner:
            return
        why = "it has ended"
        error = getattr(sys, "last_value", None)  # an uncaught exception
        if error is not None:
            first = next(iter(str(error).splitlines()), "")
            why = f"it ended with {type(error).__name__}: {first}"
        self._heartbeat.stop(why, self._cause)
        self._heartbeat.wait_for_others()
        self._heartbeat.end()
        if self._pending:
            self._leave_place()
            # Torch's destructor would wait for an exchange that nobody answers.
            for name in ("stdout", "stderr"):
                terminal.Stream(name).flush()
            os._exit(1)
        self._close(error is None)
        self._leave_place()

    def _close(self, ended_well: bool) -> None:
        """Close what was opened before Python and torch shut down, because later this may abort the
        process.

        After an exception, torch's default group stays open. The script may have started an
        exchange in it that nobody answers, and closing the group would wait for that.
        """
        groups = [*self._some.values(), self._pg]
        self._some, self._pg = {}, None
        if not dist.is_initialized():  # the script has closed all groups
            return
        while groups:
            with contextlib.suppress(ValueError):  # the script has closed this group
                dist.destroy_process_group(groups.pop())
        if self._opened_default and ended_well:
            dist.destroy_process_group()


def _added(group: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
    # dist.all_reduce() does the same, and takes 0.05 ms more in the middle of a call.
    flat = (torch.view_as_real(t) if t.is_complex() else t for t in tensors)
    return [group.allreduce([each]) for each in flat]


@atexit.register  # registered now, so that it runs after everything that is registered later
def _leave() -> None:
    if _group is not None:
        _group.leave()


def compare(facts: Mapping[str, str], what: str) -> dict[int, dict[str, str]]:
    """Return the facts that differ from those of process 0, and process 0's. If all agree, only
    digests are exchanged.
    """
    group = current()
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    digests = group.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), what)
    others = [i for i, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if not others:
        return {}
    texts = group.texts(text if group.index in (0, *others) else "", what)
    return {i: json.loads(texts[i]) for i in (0, *others)}


class DataLength(NamedTuple):
    calls: int = -1  # number of calls in one iteration; -1 if unknown
    seed: int | None = None  # seed of a shared order
    last_rows: int | None = None  # rows of the last batch, if it may be incomplete


_data_length = DataLength()


def note_data_length(length: DataLength) -> None:
    """Record how much data the iteration has that began last."""
    global _data_length
    _data_length = length


def data_length() -> DataLength:
    return _data_length
