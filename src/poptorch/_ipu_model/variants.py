"""Compare estimates of variants of one program, and define which settings can be varied."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._base import safe_files
from .._base.errors import Error
from .._base.tables import html_page, html_table, size_text, table
from .estimate import Estimate
from .parts import Culprit, verdict

LOCATIONS = {  # on chip instead of in streaming memory, shared by replicas
    "on chip": (True, False),
    "off chip": (False, False),
    "on chip, sharded": (True, True),
    "off chip, sharded": (False, True),
}
PRESENT = "as it is"  # the value of each setting in the row that changes nothing
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_COUNT = (lambda value: type(value) is int and value > 0), "an int of at least 1"
_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_PLACE = (lambda value: value in LOCATIONS), " or ".join(map(repr, LOCATIONS))
# how to check a value, and a description of valid values
SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "micro_batch": _COUNT,
    "accumulation": _COUNT,
    "device_iterations": _COUNT,
    "replicas": _COUNT,
    "recomputation": _FLAG,
    "half_partials": _FLAG,
    "memory_proportion": (
        lambda value: isinstance(value, float) and 0 < value <= 1, "a share above 0, up to 1"
    ),
    "activation_location": _PLACE,
    "weight_location": _PLACE,
    "optimizer_location": _PLACE,
    "accumulator_location": _PLACE,
    "checkpoints": _COUNT,
    "precision": (lambda value: value in PRECISIONS, " or ".join(map(repr, PRECISIONS))),
    "ipus_per_replica": _COUNT,
    "chip": (lambda value: isinstance(value, str), "mk1, mk2, bow or c600"),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One row of the table: the estimate for some settings.

    Attributes:
        settings: the varied settings by name; ``"as it is"`` for the present ones.
        items_per_second: samples per second, of all replicas of all processes.
        peak_bytes: bytes on the fullest chip at its fullest moment.
        fits: whether every chip has enough memory.
        culprit: the largest part on the fullest chip.
        bubble: the share of time in which chips wait for one another, 0 to 1.
        share_of_peak: useful operations as a share of the peak of the used chips, 0 to 1.
    """

    settings: Mapping[str, object]
    items_per_second: float
    peak_bytes: float
    fits: bool
    culprit: Culprit
    bubble: float
    share_of_peak: float

    @staticmethod
    def of(settings: Mapping[str, object], priced: Estimate) -> Variant:
        return Variant(
            settings, priced.items_per_second, priced.fullest_bytes, priced.fits, priced.culprit,
            priced.bound["bubble"], priced.share_of_peak,
        )  # fmt: skip


def _verdict(each: Variant) -> str:
    judged = verdict(each.culprit.over)
    needs = f", {100 + each.culprit.over:.0f} %: {each.culprit.category}"
    return judged if judged == "fits" else judged + needs


_FIGURES = tuple(Variant.__dataclass_fields__)[1:]


class WhatIf(tuple[Variant, ...]):
    """The variants of ``what_if``: first those that fit, sorted by speed.

    ``print`` shows a table.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(table(self._rows()))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[list[str]]:
        head = [*self[0].settings, "items/s", "peak", "bubble", "of peak", "verdict"]
        return [
            head,
            *(
                [
                    *map(str, each.settings.values()), f"{each.items_per_second:,.0f}",
                    size_text(each.peak_bytes), f"{each.bubble:.0%}", f"{each.share_of_peak:.1%}",
                    _verdict(each),
                ]
                for each in self
            ),
        ]  # fmt: skip

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the table as one page for browsers, in light or dark mode like the system."""
        title = "Comparison of settings: estimated for IPUs, nothing was run"
        page = html_page(title, html_table(self._rows()))
        safe_files.write_text_for_user(Path(path), page)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a line per variant: the varied settings, then the attributes of ``Variant``."""
        lines = io.StringIO(newline="")
        writer = csv.writer(lines)
        writer.writerow([*self[0].settings, *_FIGURES])
        for each in self:
            figures = [getattr(each, name) for name in _FIGURES]
            writer.writerow([*each.settings.values(), *figures])
        safe_files.write_text_for_user(Path(path), lines.getvalue())


def check(vary: Mapping[str, Sequence[Any]], training: bool) -> None:
    if not isinstance(vary, Mapping):
        raise Error(
            "what_if needs a dict of settings and their values", got=f"vary={vary!r}",
            fix='for example vary={"micro_batch": [4, 8], "replicas": [1, 2]}',
        )  # fmt: skip
    for name, values in vary.items():
        if name not in SETTINGS:
            raise Error(
                "what_if cannot vary this setting", got=f"vary={{{name!r}: ...}}",
                fix=f"use one of {', '.join(SETTINGS)}",
            )  # fmt: skip
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise Error(
                f"vary needs a list of values for {name}", got=repr(values),
                fix=f'for example vary={{"{name}": [...]}}',
            )  # fmt: skip
        possible, fix = SETTINGS[name]
        for value in values:
            if not possible(value):
                raise Error(f"{name} has an invalid value", got=repr(value), fix=f"use {fix}")
    if "accumulation" in vary and not training:
        raise Error(
            "Inference has no gradient accumulation that could be varied",
            got="vary={'accumulation': ...}", fix=('vary "micro_batch" instead: the device '
                                                   "iterations change with it"),
        )  # fmt: skip
