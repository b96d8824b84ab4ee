"""What collectives over a link take, by its latency and bandwidth.

A message takes latency + bytes / bandwidth: Hockney, "The Communication Challenge for MPP", 1994.
Collectives: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005; Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", 2009; gloo's own in its allreduce.cc and broadcast.cc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SEGMENT = 1 << 20  # bytes that gloo sends at once, at most
THREADS = 2  # sums that one of torch's gloo groups works on at once
# Measured with sums of 1 KiB and of 16 MiB by two processes on one machine, a core each.
COPYING = 0.7e-9  # seconds in which a process receives, adds and sends a byte
WAKING = 1.2e-4  # seconds of a step in which threads are woken


@dataclass(frozen=True)
class Link:
    """What joins processes, each on a machine of its own; both directions are alike."""

    latency: float  # seconds of an empty message, one way
    bandwidth: float  # bytes per second
    copying: float = COPYING
    waking: float = WAKING

    @property
    def step(self) -> float:
        """Seconds of an empty step: gloo sends what the other end has said that it waits for."""
        return 2 * self.latency + self.waking


Collective = Callable[[float, int, Link, int], float]
"""Seconds of a sum over processes: its bytes, how many they are, and how many run at once."""


def ring(size: float, processes: int, link: Link, at_once: int = 1) -> float:
    """What runs: segments go round twice, and of each process two are under way."""
    if processes < 2 or not size:
        return 0.0
    of_each = max(2, math.ceil(size / processes / SEGMENT))
    segment = at_once * size / processes / of_each
    sent, handled = segment / link.bandwidth, segment * link.copying
    first = following = link.step + 2 * sent + handled
    if processes > 2:  # between two, answers wait behind the data
        following = max(link.step + sent + handled, 2 * sent, 2 * handled)
    return 2 * (first + ((processes - 1) * of_each / 2 - 1) * following)


def fitted(processes: int, tiny: float, size: float, seconds: float) -> Link:
    """Return the link over which sums of a few and of so many bytes take so long.

    Both numbers are rounded to powers of two: runs that measure about the same decide the same.
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
    """What runs: a process after the other passes its part on, along a tree; some at once."""
    if processes < 2:
        return 0.0
    levels = math.ceil(math.log2(processes))
    part = THREADS * (1 - 1 / processes) * size / processes  # all but a process's own come to it
    of_one = link.step + levels * (link.step / 2 + part / link.bandwidth + part * link.copying)
    return math.ceil(processes / THREADS) * of_one


@dataclass(frozen=True)
class Exchanged:
    """What an update exchanges: bytes of buckets; those of one inner tuple travel together."""

    early: tuple[float, ...] = ()  # while the rest of backward runs
    late: tuple[tuple[float, ...], ...] = ()
    gathered: tuple[float, ...] = ()  # updated weights, of which each process has a part
    left: float = 0.0  # share of the computation beside which the early ones travel
    updates: int = 1  # in a call

    @property
    def buckets(self) -> list[float]:
        return [*self.early, *(size for each in self.late for size in each)]

    def scaled(self, factor: float) -> Exchanged:
        late = tuple(tuple(factor * size for size in each) for each in self.late)
        early, gathered = (tuple(factor * s for s in own) for own in (self.early, self.gathered))
        return replace(self, early=early, late=late, gathered=gathered)

    def joined(self) -> Exchanged:
        late = tuple((sum(each),) for each in self.late if each)
        return replace(self, early=(sum(self.early),) if self.early else (), late=late)

    def seconds(self, computing: float, processes: int, link: Link, by: Collective = ring) -> float:
        """Return the seconds that a call with so much computation waits for its exchanges."""
        if processes < 2:
            return 0.0
        first, others = self.late[0] if self.late else (), self.late[1:]
        waited = _summed(first, processes, link, by)
        if self.early:  # what is left of them when the others begin travels beside those
            alone, beside = self.early, (*self.early, *first)
            share = self.left * computing / self.updates / _summed(alone, processes, link, by)
            together = _summed(beside, processes, link, by)
            waited += max(0.0, 1 - share) * (together - waited)
        waited += sum(_summed(each, processes, link, by) for each in others)
        waited += sum(gather(size, processes, link) for size in self.gathered)
        return self.updates * waited


def saved(early: float, late: float, left: float, processes: int, link: Link) -> float:
    """Return the seconds saved if early bytes leave beside work of ``left`` seconds.

    Only the link's part of a sum is hidden: handling it takes the processor from the work.
    """
    wire = replace(link, copying=0.0, waking=0.0)
    whole, cut = Exchanged(late=((early + late,),)), Exchanged((early,), ((late,),), left=1.0)
    waits = [own.seconds(left, processes, wire) for own in (whole, cut)]
    return waits[0] - waits[1] - 2 * link.waking


def _summed(sizes: Sequence[float], processes: int, link: Link, by: Collective) -> float:
    rounds = (sizes[at : at + THREADS] for at in range(0, len(sizes), THREADS))
    return sum(by(sum(own) / len(own), processes, link, len(own)) for own in rounds)
