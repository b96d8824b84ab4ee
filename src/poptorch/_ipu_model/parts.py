"""Define the parts of an Estimate: chips, operators, tensors, and suggested changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._base.tables import size_text, time_text

_CLOSE = 0.1  # the precision of memory estimates, as a share of the limit
VERDICTS = {
    "fits": "fits",
    "close": "CLOSE (0.9 to 1.1 of the limit)",
    "does not fit": "DOES NOT FIT",
}


def verdict(over: float) -> str:
    """Return the verdict for the excess memory of the fullest chip, in per cent; negative
    if it fits.
    """
    if abs(over) <= 100 * _CLOSE:
        return "close"
    return "fits" if over < 0 else "does not fit"


@dataclass(frozen=True)
class Culprit:
    """What prevents a program from fitting, or would be the first to do so."""

    chip: int  # index of the fullest chip
    stage: str  # what runs there at the fullest moment, as an action, for example 1B3
    category: str  # the memory category that takes most there
    tensor: str  # the largest tensor in that category, "" if it has no named tensors
    module: str  # path of the module that it belongs to
    line: str  # description of the user's line, or ""
    bytes: float  # size of the category
    over: float  # how much more than its memory the chip needs, in per cent; negative if it fits

    def __str__(self) -> str:
        share = f"chip {self.chip} needs {100 + self.over:.0f} % of its memory"
        part = f"the largest part is {self.category}, {size_text(self.bytes)}"
        tensor = f"; the largest tensor is {self.tensor}" if self.tensor else ""
        of = f" of {self.module}" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return f"{share} at {self.stage or 'rest'}; {part}{tensor}{of}{line}"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is on a chip at its fullest moment."""

    name: str
    category: str  # category of memory
    bytes: float  # for all micro-batches together, if it waits
    module: str  # path of the module that computes or reads it
    line: str  # description of the user's line, or ""


@dataclass(frozen=True)
class ChipEstimate:
    """One chip of a replica."""

    chip: int  # its index
    cycles: float  # busy cycles per call, of any kind
    # cycles per call by activity; including waiting, they are all cycles
    parts: Mapping[str, float]
    always: Mapping[str, float]  # permanent bytes by category
    peak: Mapping[str, float]  # bytes by category at the fullest moment
    peak_at: str  # the action at that moment
    limit: int  # bytes of its memory
    live: tuple[float, ...] = field(repr=False)  # bytes at every column of the schedule
    tiles: tuple[int, ...] = field(repr=False)  # bytes of every tile at the fullest moment
    largest: tuple[LiveTensor, ...] = field(repr=False)  # at the fullest moment
    # The largest tensor at the fullest moment of each pass, by its name; "" means rest.
    moments: Mapping[str, LiveTensor] = field(repr=False)

    @property
    def bytes(self) -> float:
        """Bytes at the fullest moment, counted as if every tile used as much as the fullest."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class TimedAction:
    """One action of the simulated schedule. Times are cycles after its beginning."""

    chip: int
    column: int  # column of the schedule
    name: str  # for example 1F3
    start: float
    parts: Mapping[str, float]  # its own cycles by activity
    sent: float  # cycles after its end until what it sends has arrived at other chips

    @property
    def cycles(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class OperatorEstimate:
    """One kind of operator of one module in one pass. Its parts are those of a single run."""

    stage_pass: str  # for example 1B
    chip: int
    name: str
    module: str  # its path
    line: str  # description of the user's line, or ""
    count: int  # how many times one run of the pass does it
    compute: float
    exchange: float
    sync: float
    flops: int  # operations of matrix products
    runs: int = 1  # runs of the pass per call

    @property
    def cycles(self) -> float:
        """Cycles per call."""
        return self.runs * (self.compute + self.exchange + self.sync)


@dataclass(frozen=True)
class Guess:
    """A constant without a source."""

    name: str
    value: float
    unit: str
    meaning: str
    share: float  # how much of the seconds, or of the bytes if that is more, depends on it: 0 to 1


@dataclass(frozen=True)
class Advice:
    """One suggested change with its estimate."""

    change: str  # what to write
    saves: float  # bytes on the fullest chip
    costs: float  # additional seconds for the samples of a call; negative if it is faster
    fits: bool  # after the change
    longer: float = 1.0  # the new time of a call divided by the old one

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}"

    @property
    def effect(self) -> str:
        size = size_text(abs(self.saves))
        room = f"saves {size} and " if self.saves >= 0 else f"needs {size} more and "
        if abs(self.saves) < 1024:
            room = ""
        change = "longer" if self.costs > 0 else "less"
        time = f"takes {time_text(abs(self.costs))} {change} for the same number of samples"
        call = f" A call takes {self.longer:.1f} times as long." if self.longer >= 1.25 else ""
        verdict = "The model then fits." if self.fits else "The model still does not fit."
        return f"{room}{time}.{call} {verdict}"
