"""Estimate: what a program would cost on IPUs, with its parts, for people and for programs."""

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
from .._systems import parse
from . import page, profile
from .parts import Action, Advice, ChipEstimate, Culprit, Guess, OperatorEstimate
from .scaling import Scaling


def _script() -> str:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").name


@dataclass(frozen=True)
class Estimate:
    """The cost of a program on IPUs, all of it estimated. ``print`` shows a table.

    Attributes:
        name: the model and its use.
        system: the chips, for instance ``bow:16``.
        kind: of program, which decides about the error: transformer, convolution, host-bound.
        fits: whether every chip has enough memory.
        verdict: ``"fits"``, ``"does not fit"``, or ``"close"``: from 0.9 to 1.1 of the limit, where
            the model of memory cannot tell.
        culprit: the largest part on the fullest chip.
        seconds: per call, the host's part included.
        cycles: per call, of the chips.
        items_per_second: samples per second, of all replicas of all processes.
        share_of_peak: useful operations as a share of what the used chips can do at most.
            Recomputation does not count.
        bound: how the chips spend their time, as shares that add up to 1: compute, exchange, sync,
            host link, streaming memory, bubble, host call.
        chips: of one replica.
        replicas: how many there are, in all processes.
        operators: the most expensive of a call first.
        schedule: every action of one run of the schedule.
        runs: how often a call runs the schedule.
        guesses: the constants without a source that matter.
        advice: changes, the best first.
        error_band: the largest factor between published results of this kind and estimates
            whose constants were fitted to the other results.
        clock: cycles per second.
        script: the name of the program's file, "" if it has none.
        scaling: the curve over ``processes``, or None: ``computing`` seconds of a call of one, and
            ``rows``. A row has the ``seconds`` of a call, those of them spent ``exchanging``,
            the ``efficiency``, what it is ``bound`` by, and ``remedies``.
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
    schedule: tuple[Action, ...] = field(repr=False)
    runs: int
    guesses: tuple[Guess, ...]
    advice: tuple[Advice, ...]
    error_band: float
    clock: float
    script: str = field(default_factory=_script)
    scaling: Scaling | None = None

    @property
    def fullest_bytes(self) -> float:
        """Bytes of the fullest chip at its fullest moment."""
        return max(chip.bytes for chip in self.chips)

    def __str__(self) -> str:
        return text_of(profile.shown(self.to_dict()))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return html_of(profile.shown(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, as ``to_json`` writes them."""
        return profile.profile(asdict(self), parse(self.system).kind, None, {})

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a profile, its attributes under ``estimated``, for ``poptorch report``."""
        safe_files.write_text_for_user(Path(path), json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write it as one page for browsers."""
        page.write(self.to_dict(), Path(path))

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Write one run of the schedule for Perfetto: a process per chip, a lane per kind."""
        trace = profile.trace(self.to_dict())
        safe_files.write_text_for_user(Path(path), json.dumps(trace))
