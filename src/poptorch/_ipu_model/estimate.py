"""Estimate: what a program would cost on IPUs, with its parts, for people and for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .._base import html
from .._base.tables import size_text, table

FORMAT = 2
"""Version of the JSON form."""

ERROR_BAND = 1.15
"""The factor within which the estimates of the rows that constants were fitted to lie; printed by
``benchmarks/ipu_rows.py``."""


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


@dataclass(frozen=True)
class Estimate:
    """What a program would cost on IPUs. Nothing of it was measured; printing it shows a table.

    Attributes:
        system: chips that it was priced for, for instance ``bow:16``.
        fits: whether every chip has enough memory.
        culprit: what takes most on the fullest chip.
        seconds: per call, the host's part included.
        cycles: per call, of the chips.
        items_per_second: samples per second, of all replicas of all processes.
        share_of_peak: of the peak of all chips that are used, for the products of the model, none
            counted twice.
        bound: what the chips' time goes to, as shares that add up to 1: compute, exchange, sync,
            host link, streaming memory, bubble, host call.
        chips: of one replica.
        replicas: how many there are, in all processes.
        operators: by cost, the dearest first.
        schedule: every action of one run of the schedule.
        runs: how often a call runs the schedule.
        guesses: constants without a source that matter.
        advice: changes, the best first.
        error_band: the factor by which published results of the calibration differ at most.
        clock: cycles per second.
    """

    system: str
    fits: bool
    culprit: Culprit
    seconds: float
    cycles: float
    items_per_second: float
    share_of_peak: float
    bound: Mapping[str, float]
    chips: tuple[ChipEstimate, ...]
    replicas: int
    operators: tuple[OperatorEstimate, ...] = field(repr=False)
    schedule: tuple[Action, ...] = field(repr=False)
    runs: int
    guesses: tuple[Guess, ...]
    advice: tuple[Advice, ...]
    error_band: float
    clock: float

    def __str__(self) -> str:
        return "\n".join([*_summary(self), *table(_chips(self)), *_remarks(self)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it where a notebook shows text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        parts = html.paragraphs(_summary(self)), html.table(_chips(self))
        return "".join([*parts, html.paragraphs(_remarks(self))])

    def to_dict(self) -> dict[str, object]:
        """Return it as plain values, as ``to_json`` writes them."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the key ``format`` is the version, the others are the attributes."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write it as one page for browsers, which needs plotly to be installed.

        Raises:
            poptorch.Error: plotly is not.
        """
        from .profile import estimate_page

        estimate_page(self, Path(path))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write one run of the schedule for Perfetto: a process per chip, a lane per kind."""
        from .trace import trace

        Path(path).write_text(json.dumps(trace(self)))


def _summary(estimate: Estimate) -> list[str]:
    busiest = max(estimate.bound, key=lambda part: estimate.bound[part])
    used = len(estimate.chips) * estimate.replicas
    return [
        f"on {estimate.system}: {estimate.replicas} replicas of {len(estimate.chips)} IPUs, "
        f"{used} used (estimated, within a factor {estimate.error_band:g} where it was checked)",
        f"{'fits' if estimate.fits else 'DOES NOT FIT'}: {estimate.culprit}",
        f"{estimate.items_per_second:,.0f} items/s, {estimate.seconds:.4g} s per call, "
        f"{estimate.cycles:,.0f} cycles, {estimate.share_of_peak:.1%} of peak, bound by {busiest}",
        "  ".join(f"{name} {share:.0%}" for name, share in estimate.bound.items()),
    ]


def _chips(estimate: Estimate) -> list[list[str]]:
    rows = [["ipu", "busy", "peak", "of limit", "at", "most of it"]]
    for chip in estimate.chips:
        whole = sum(chip.parts.values())
        top = sorted(chip.peak.items(), key=lambda item: -item[1])[:3]
        rows.append(
            [
                str(chip.chip), f"{chip.cycles / whole:.0%}", size_text(chip.bytes),
                f"{chip.bytes / chip.limit:.0%}", chip.peak_at,
                ", ".join(f"{name} {size_text(size)}" for name, size in top),
            ]
        )  # fmt: skip
    return rows


def _remarks(estimate: Estimate) -> list[str]:
    lines = []
    if estimate.guesses:
        named = ", ".join(f"{guess.name} {guess.share:.0%}" for guess in estimate.guesses[:4])
        lines.append(f"guessed: {named}")
    lines += [f"advice: {each}" for each in estimate.advice[:3]]
    return lines
