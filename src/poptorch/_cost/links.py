"""Estimate how long a link with a given latency and bandwidth takes for the exchanges between
processes.

A message takes latency + bytes / bandwidth: Hockney, "The Communication Challenge for MPP", 1994.
Collectives: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", 2009; gloo's own algorithms are in its allreduce.cc and broadcast.cc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SEGMENT = 1 << 20  # largest number of bytes that gloo sends at once
THREADS = 2  # number of sums that one of torch's gloo groups computes at the same time
# Measured with sums of 1 KiB and of 16 MiB by two processes on one machine, with a core each.
COPYING = 0.7e-9  # seconds in which a process receives, adds and sends a byte
WAKING = 1.2e-4  # seconds of a step in which threads are woken


@dataclass(frozen=True)
class Link:
    """A link between processes on different machines. Both directions are equal."""

    latency: float  # seconds of an empty message, one way
    bandwidth: float  # bytes per second
    copying: float = COPYING
    waking: float = WAKING

    @property
    def step(self) -> float:
        """Seconds of an empty step: gloo sends data only after the other end has announced that it
        waits.
        """
        return 2 * self.latency + self.waking


Collective = Callable[[float, int, Link, int], float]
"""Seconds of a sum over processes: its bytes, the number of processes, and the number of concurrent
sums.
"""


def ring(size: float, processes: int, link: Link, at_once: int = 1) -> float:
    """Return the seconds of the algorithm in use: segments go round twice, and two per process are
    in flight.
    """
    if processes < 2 or not size:
        return 0.0
    of_each = max(2, math.ceil(size / processes / SEGMENT))
    segment = at_once * size / processes / of_each
    sent, handled = segment / link.bandwidth, segment * link.copying
    first = following = link.step + 2 * sent + handled
    if processes > 2:  # between two processes, answers wait behind the data
        following = max(link.step + sent + handled, 2 * sent, 2 * handled)
    return 2 * (first + ((processes - 1) * of_each / 2 - 1) * following)


def fitted(processes: int, tiny: float, size: float, seconds: float) -> Link:
    """Return the link over which sums of a few bytes and of ``size`` bytes take these times.

    Both numbers are rounded to powers of two, so that runs with similar measurements make the same
    decisions.
    """
    step = tiny / (2 * (processes - 1))
    latency = max(0.0, (step - WAKING) / 2)
    low, high = 1.0, 1e12
    for _ in range(60):
        middle = math.sqrt(low * high)
        slower = ring(size, processes, Link(latency, middle)) > seconds
        low, high = (middle, high) if slower else (low, middle)
    return Link(*(2.0 ** round(math.log2(each)) for each in (max(latency, 1e-6), low)))


def gather(size: float, processes: int, link: Link) -> float:
    """Return the seconds of the algorithm in use: one process after the other sends its part along
    a tree, some concurrently.
    """
    if processes < 2:
        return 0.0
    levels = math.ceil(math.log2(processes))
    # each process receives all parts except its own
    part = THREADS * (1 - 1 / processes) * size / processes
    of_one = link.step + levels * (link.step / 2 + part / link.bandwidth + part * link.copying)
    return math.ceil(processes / THREADS) * of_one


@dataclass(frozen=True)
class UpdateExchange:
    """What an update exchanges: bytes of buckets. Those in one inner tuple are sent together."""

    early: tuple[float, ...] = ()  # exchanged while the rest of the backward pass runs
    late: tuple[tuple[float, ...], ...] = ()
    gathered: tuple[float, ...] = ()  # updated weights that are divided among processes
    left: float = 0.0  # share of the computation during which the early ones are exchanged
    updates: int = 1  # per call

    @property
    def buckets(self) -> list[float]:
        return [*self.early, *(size for each in self.late for size in each)]

    def scaled(self, factor: float) -> UpdateExchange:
        late = tuple(tuple(factor * size for size in each) for each in self.late)
        early, gathered = (tuple(factor * s for s in own) for own in (self.early, self.gathered))
        return replace(self, early=early, late=late, gathered=gathered)

    def joined(self) -> UpdateExchange:
        late = tuple((sum(each),) for each in self.late if each)
        return replace(self, early=(sum(self.early),) if self.early else (), late=late)

    def seconds(self, computing: float, processes: int, link: Link, by: Collective = ring) -> float:
        """Return the seconds that a call with this computation waits for its exchanges."""
        if processes < 2:
            return 0.0
        first, others = self.late[0] if self.late else (), self.late[1:]
        waited = _summed(first, processes, link, by)
        # early exchanges that are unfinished when the others start share the link with them
        if self.early:
            alone, with_first = self.early, (*self.early, *first)
            share = self.left * computing / self.updates / _summed(alone, processes, link, by)
            together = _summed(with_first, processes, link, by)
            waited += max(0.0, 1 - share) * (together - waited)
        waited += sum(_summed(each, processes, link, by) for each in others)
        waited += sum(gather(size, processes, link) for size in self.gathered)
        return self.updates * waited


def saved(early: float, late: float, left: float, processes: int, link: Link) -> float:
    """Return the seconds saved by exchanging the early bytes during ``left`` seconds of work.

    Only the link's part of a sum is hidden, because handling the messages takes processor time from
    the work.
    """
    wire = replace(link, copying=0.0, waking=0.0)
    whole, cut = (
        UpdateExchange(late=((early + late,),)),
        UpdateExchange((early,), ((late,),), left=1.0),
    )
    waits = [own.seconds(left, processes, wire) for own in (whole, cut)]
    return waits[0] - waits[1] - 2 * link.waking


def _summed(sizes: Sequence[float], processes: int, link: Link, by: Collective) -> float:
    rounds = (sizes[at : at + THREADS] for at in range(0, len(sizes), THREADS))
    return sum(by(sum(own) / len(own), processes, link, len(own)) for own in rounds)
