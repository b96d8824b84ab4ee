"""Look up the cycles per element of the tiles' vector loops in ``element_cycles.toml``."""

from __future__ import annotations

import tomllib
from fractions import Fraction
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_READ = {name: [float(Fraction(each)) for each in row] for name, row in _TABLES["read"].items()}
_SAME = {name: row for row, names in _TABLES["same"].items() for name in names.split()}
_MADE: dict[str, dict[str, int]] = _TABLES["made"]


def cycles_per_element(name: str, itemsize: int, integers: bool = False) -> float:
    if integers:
        return _READ["int_div" if name in ("div", "remainder", "floor_divide") else "int_add"][0]
    row = _row(name) or "add"
    row = _SAME.get(row, row)
    if row in _MADE:
        parts = _MADE[row].items()
        return sum(often * cycles_per_element(part, itemsize) for part, often in parts)
    return _READ[row][1 if itemsize <= 2 else 0]


def is_known(name: str) -> bool:
    return _row(name) is not None


def _row(name: str) -> str | None:
    if name in _READ or name in _MADE or name in _SAME:
        return name
    if "norm" in name:
        return "norm_backward" if "backward" in name else "norm"
    for part in ("pool", "upsample", "nll_loss"):
        if part in name:
            return part
    plain = name.rstrip("_")
    return plain if plain in _READ or plain in _MADE or plain in _SAME else None
