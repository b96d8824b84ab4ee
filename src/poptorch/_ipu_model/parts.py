"""The parts of an Estimate: what its chips, operators and tensors take, what could be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._base.tables import size_text


@dataclass(frozen=True)
class Culprit:
    """What makes a program not fit, or would first.

    Attributes:
        chip: index of the fullest chip.
        stage: what runs there at the fullest moment, as an action, for instance ``1B3``.
        category: of memory that takes most there.
        tensor: the largest tensor of that category, "" where it has none by name.
        module: path of the module that it belongs to.
        line: the user's line, described, or "".
        bytes: that the category takes.
        over: how much more the chip needs than it has, in per cent; negative if it fits.
    """

    chip: int
    stage: str
    category: str
    tensor: str
    module: str
    line: str
    bytes: float
    over: float

    def __str__(self) -> str:
        where = f" on chip {self.chip} at {self.stage or 'rest'}"
        what = f"{self.category}, {size_text(self.bytes)}{where}"
        named = f"; largest: {self.tensor}" if self.tensor else ""
        of = f" of {self.module}" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return f"{what}{named}{of}{line}; {self.over:+.1f} % against the limit"


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is on a chip at its fullest moment.

    Attributes:
        name: of the tensor; of what waits of several micro-batches, all together.
        category: of memory.
        bytes: that it takes.
        module: path of the module that makes or reads it.
        line: the user's line, described, or "".
    """

    name: str
    category: str
    bytes: float
    module: str
    line: str


@dataclass(frozen=True)
class ChipEstimate:
    """One chip of a replica.

    Attributes:
        chip: its index.
        cycles: that it is busy in one call, of any kind.
        parts: cycles of one call by what it does; with ``bubble`` and ``call`` they are the whole.
        always: bytes by category that are there all the time.
        peak: bytes by category at the fullest moment.
        peak_at: the action of that moment.
        limit: bytes that it has.
        live: bytes at every column of the schedule.
        tiles: bytes of every tile at the fullest moment; what the fullest has more than others is
            in ``peak``, as gaps and imbalance.
        largest: tensors at the fullest moment, the largest first.
    """

    chip: int
    cycles: float
    parts: Mapping[str, float]
    always: Mapping[str, float]
    peak: Mapping[str, float]
    peak_at: str
    limit: int
    live: tuple[float, ...] = field(repr=False)
    tiles: tuple[int, ...] = field(repr=False)
    largest: tuple[LiveTensor, ...] = field(repr=False)

    @property
    def bytes(self) -> float:
        """Bytes at the fullest moment: as many as if every tile had those of the fullest."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Action:
    """One action of the simulated schedule; times are cycles after its beginning.

    Attributes:
        chip: where.
        name: for instance ``1F3``.
        start: when.
        parts: its own cycles by what they are spent on.
        sent: cycles until what it sends has arrived at other chips, after its own.
    """

    chip: int
    name: str
    start: float
    parts: Mapping[str, float]
    sent: float

    @property
    def cycles(self) -> float:
        """All of its own time."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class OperatorEstimate:
    """One kind of operator of one module in one pass.

    Attributes:
        stage_pass: for instance ``1B``.
        chip: where it runs.
        name: of the operator.
        module: path of the module.
        line: the user's line, described, or "".
        count: how often one run of the pass does it.
        compute, exchange, sync: cycles of one run of the pass.
        flops: of one run of the pass, of matrix products.
    """

    stage_pass: str
    chip: int
    name: str
    module: str
    line: str
    count: int
    compute: float
    exchange: float
    sync: float
    flops: int

    @property
    def cycles(self) -> float:
        """All of its cycles."""
        return self.compute + self.exchange + self.sync


@dataclass(frozen=True)
class Guess:
    """A constant without a source.

    Attributes:
        name: of the constant.
        value, unit: what it is.
        meaning: what it stands for.
        share: how much of the seconds, or of the bytes if that is more, goes with it: 0 to 1.
    """

    name: str
    value: float
    unit: str
    meaning: str
    share: float


@dataclass(frozen=True)
class Advice:
    """One change, priced.

    Attributes:
        change: what to write.
        saves: bytes on the fullest chip.
        costs: seconds per call more; negative if it is faster.
        fits: whether it fits then.
    """

    change: str
    saves: float
    costs: float
    fits: bool

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        room = f"{size_text(abs(self.saves))} {'less' if self.saves >= 0 else 'more'}"
        time = f"{abs(self.costs) * 1e3:.3g} ms {'more' if self.costs > 0 else 'less'}"
        return f"{self.change}: {room}, {time} per call, {verdict}"
