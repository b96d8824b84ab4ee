"""Estimates of variants of one program, side by side."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base import html
from .._base.tables import size_text, table
from .estimate import Culprit, Estimate

FIGURES = ("items_per_second", "peak_bytes", "fits", "culprit", "bubble", "share_of_peak")


@dataclass(frozen=True)
class Variant:
    """One line of the table: what ``poptorch.estimate`` says of the changed settings.

    Attributes:
        settings: what was varied, by name.
        items_per_second: samples per second, of all replicas of all processes.
        peak_bytes: on the fullest chip at its fullest moment.
        fits: whether every chip has enough memory.
        culprit: what takes most on the fullest chip.
        bubble: share of the chips' time in which they wait for one another, 0 to 1.
        share_of_peak: of the peak of all chips that are used, 0 to 1.
    """

    settings: Mapping[str, object]
    items_per_second: float
    peak_bytes: float
    fits: bool
    culprit: Culprit
    bubble: float
    share_of_peak: float


def variant(settings: Mapping[str, object], priced: Estimate) -> Variant:
    """Return the line of an estimate."""
    return Variant(
        settings, priced.items_per_second, max(chip.bytes for chip in priced.chips), priced.fits,
        priced.culprit, priced.bound["bubble"], priced.share_of_peak,
    )  # fmt: skip


class WhatIf(tuple[Variant, ...]):
    """What ``what_if`` returns: variants, those that fit first, the fastest of them first.

    Printing it shows a table.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(table(self._rows()))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it where a notebook shows text."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        return html.table(self._rows())

    def _rows(self) -> list[list[str]]:
        head = [*self[0].settings, "items/s", "peak", "bubble", "of peak", "verdict"]
        return [
            head,
            *(
                [
                    *map(str, each.settings.values()), f"{each.items_per_second:,.0f}",
                    size_text(each.peak_bytes), f"{each.bubble:.0%}", f"{each.share_of_peak:.1%}",
                    "fits" if each.fits else f"{each.culprit.over:+.0f} %: {each.culprit.category}",
                ]
                for each in self
            ),
        ]  # fmt: skip

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the table as one page for browsers, light or dark as the reader's system is."""
        Path(path).write_text(html.page("Other settings, side by side", html.table(self._rows())))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a line per variant: what was varied, then the attributes of ``Variant``."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*self[0].settings, *FIGURES])
            for each in self:
                figures = [getattr(each, name) for name in FIGURES]
                writer.writerow([*each.settings.values(), *figures])


def ranked(variants: list[Variant]) -> WhatIf:
    """Return the table."""
    return WhatIf(sorted(variants, key=lambda each: (not each.fits, -each.items_per_second)))
