"""The parts of an Estimate: what its chips, operators and tensors take, what could be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._base.tables import size_text, time_text

_CLOSE = 0.1  # of the limit: what memory is exact to
VERDICTS = {
    "fits": "fits",
    "close": "CLOSE (0.9 to 1.1 of the limit)",
    "does not fit": "DOES NOT FIT",
}


def verdict(over: float) -> str:
    """Judge what the fullest chip needs more than it has, in per cent; negative if less."""
    if abs(over) <= 100 * _CLOSE:
        return "close"
    return "fits" if over < 0 else "does not fit"


@dataclass(frozen=True)
class Culprit:
    """What makes a program not fit, or would first."""

    chip: int  # index of the fullest
    stage: str  # what runs there at the fullest moment, as an action, for instance 1B3
    category: str  # of memory that takes most there
    tensor: str  # the largest of that category, "" where it has none by name
    module: str  # path of the module that it belongs to
    line: str  # the user's, described, or ""
    bytes: float  # that the category takes
    over: float  # how much more the chip needs than it has, in per cent; negative if it fits

    def __str__(self) -> str:
        where = f" on chip {self.chip} at {self.stage or 'rest'}"
        what = f"{self.category}, {size_text(self.bytes)}{where}"
        named = f"; largest: {self.tensor}" if self.tensor else ""
        of = f" of {self.module}" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return f"{what}{named}{of}{line}; {100 + self.over:.0f} % of its memory"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is on a chip at its fullest moment."""

    name: str
    category: str  # of memory
    bytes: float  # of several micro-batches, where it waits, all together
    module: str  # path of the module that makes or reads it
    line: str  # the user's, described, or ""


@dataclass(frozen=True)
class ChipEstimate:
    """One chip of a replica."""

    chip: int  # its index
    cycles: float  # that it is busy in one call, of any kind
    parts: Mapping[str, float]  # cycles of one call by what it does; with waiting they are all
    always: Mapping[str, float]  # bytes by category that are there all the time
    peak: Mapping[str, float]  # bytes by category at the fullest moment
    peak_at: str  # the action of that moment
    limit: int  # bytes that it has
    live: tuple[float, ...] = field(repr=False)  # bytes at every column of the schedule
    tiles: tuple[int, ...] = field(repr=False)  # bytes of every tile at the fullest moment
    largest: tuple[LiveTensor, ...] = field(repr=False)  # at the fullest moment
    # What is largest at the fullest moment of each pass, by its name; "" is rest.
    moments: Mapping[str, LiveTensor] = field(repr=False)

    @property
    def bytes(self) -> float:
        """Bytes at the fullest moment: as many as if every tile had those of the fullest."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Action:
    """One action of the simulated schedule; times are cycles after its beginning."""

    chip: int
    column: int  # of the schedule
    name: str  # for instance 1F3
    start: float
    parts: Mapping[str, float]  # its own cycles by what they are spent on
    sent: float  # cycles until what it sends has arrived at other chips, after its own

    @property
    def cycles(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class OperatorEstimate:
    """One kind of operator of one module in one pass; its parts are those of one run of it."""

    stage_pass: str  # for instance 1B
    chip: int
    name: str
    module: str  # its path
    line: str  # the user's, described, or ""
    count: int  # how often one run of the pass does it
    compute: float
    exchange: float
    sync: float
    flops: int  # of matrix products
    runs: int = 1  # of the pass in a call

    @property
    def cycles(self) -> float:
        """Of one call."""
        return self.runs * (self.compute + self.exchange + self.sync)


@dataclass(frozen=True)
class Guess:
    """A constant without a source."""

    name: str
    value: float
    unit: str
    meaning: str
    share: float  # of the seconds, or of the bytes if that is more, that goes with it: 0 to 1


@dataclass(frozen=True)
class Advice:
    """One change, priced."""

    change: str  # what to write
    saves: float  # bytes on the fullest chip
    costs: float  # seconds more for the samples of a call; negative if it is faster
    fits: bool  # then
    longer: float = 1.0  # the new time of a call, divided by the old one

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}"

    @property
    def effect(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        room = f"{size_text(abs(self.saves))} {'less' if self.saves >= 0 else 'more'}, "
        time = f"{time_text(abs(self.costs))} {'more' if self.costs > 0 else 'less'}"
        room = room if abs(self.saves) >= 1024 else ""
        first = f"a call takes {self.longer:.1f} times as long; " if self.longer >= 1.25 else ""
        return f"{first}{room}{time} for as many samples, {verdict}"
