"""Define ``Estimate``, the result of an estimate: what a program would cost on IPUs, for people and
for programs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .._base import safe_files
from .._base.tables import html_of, text_of
from .._ipu_systems import parse
from . import profile, report_page
from .parts import Advice, ChipEstimate, Culprit, Guess, OperatorEstimate, TimedAction
from .scaling import Scaling


def _script() -> str:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").name


@dataclass(frozen=True)
class Estimate:
    """The cost of a program on IPUs. All numbers are estimates. ``print`` shows a table.

    Attributes:
        name: the model and its use.
        system: the chips, for example ``bow:16``.
        kind: the kind of program, which determines the error: transformer, convolution, host-bound.
        fits: whether every chip has enough memory.
        verdict: ``"fits"``, ``"does not fit"``, or ``"close"``: from 0.9 to 1.1 of the limit, where
            the memory model is not precise enough.
        culprit: the largest part on the chip with the highest memory use.
        seconds: per call, including the host's part.
        cycles: per call, on the chips.
        items_per_second: samples per second, of all replicas of all processes.
        share_of_peak: useful operations as a share of the peak of the used chips. Recomputation
            does not count.
        bound: how the chips spend their time, as shares that add up to 1: compute, exchange, sync,
            host link, streaming memory, bubble, host call.
        chips: the chips of one replica.
        replicas: the number of replicas in all processes.
        operators: the operators of a call, the most expensive first.
        schedule: every action of one run of the schedule.
        runs: how many times a call runs the schedule.
        guesses: the constants without a source on which the result depends.
        advice: suggested changes, the best first.
        error_band: the largest factor between published results of this kind and estimates
            whose constants were fitted to the other results.
        clock: cycles per second.
        script: the name of the program's file, "" if it has none.
        scaling: the curve over ``processes``, or None: ``computing``, the seconds of a call of one
            process, and ``rows``. A row has the ``seconds`` of a call, the part of them spent
            ``exchanging``, the ``efficiency``, what it is ``bound`` by, and ``remedies``.
    """

    name: str
    system: str
    kind: str
    fits: bool
    verdict: str
    culprit: Culprit
    seconds: float
    cycles: float
    items_per_second: float
    share_of_peak: float
    bound: Mapping[str, float]
    chips: tuple[ChipEstimate, ...]
    replicas: int
    operators: tuple[OperatorEstimate, ...] = field(repr=False)
    schedule: tuple[TimedAction, ...] = field(repr=False)
    runs: int
    guesses: tuple[Guess, ...]
    advice: tuple[Advice, ...]
    error_band: float
    clock: float
    script: str = field(default_factory=_script)
    scaling: Scaling | None = None

    @property
    def fullest_bytes(self) -> float:
        """Return the bytes of the fullest chip at its fullest moment."""
        return max(chip.bytes for chip in self.chips)

    def __str__(self) -> str:
        return text_of(profile.shown(self.to_dict()))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return html_of(profile.shown(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, as ``to_json`` writes them."""
        return profile.profile(asdict(self), parse(self.system).kind, None, {})

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a profile with the attributes under ``estimated``, for ``poptorch report``."""
        safe_files.write_text_for_user(Path(path), json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the estimate as one page for browsers."""
        report_page.write(self.to_dict(), Path(path))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write one run of the schedule for Perfetto, with a process per chip and a lane
        per kind.
        """
        trace = profile.trace(self.to_dict())
        safe_files.write_text_for_user(Path(path), json.dumps(trace))
