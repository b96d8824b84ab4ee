"""Look up what names of PopTorch mean in plain PyTorch (`meanings.toml`) and in this library."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import poptorch

from ..options.option_table import IDLE, RESULTS, OptionRow
from ..options.overview import settings

CLASSES = {
    "loop": "become loops",
    "direct": "are in torch",
    "nothing": "are not needed on other devices",
    "by hand": "must be translated by hand",
}
PACKAGES = ("poptorch", "popart", "popdist", "poptorch_geometric", "pva")
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ROWS: dict[str, dict[str, Any]] = _TABLE["names"]
# classes whose members have different meanings
_OWNERS = ("Options", "PoplarExecutor", "DataLoader", "optim")
_ABSENT = object()


@dataclass(frozen=True)
class Meaning:
    """A row of the table. The file explains its fields."""

    kind: str
    torch: str
    own: bool  # the row is for this name only, not for many names
    value: bool = False  # for an option or argument without an entry
    field: str = ""
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
    write: str = ""
    by: str = ""
    cases: dict[str, str] = dataclasses.field(default_factory=dict)
    rename: str = ""
    without: Sequence[str] = ()
    hand: dict[str, str] = dataclasses.field(default_factory=dict)
    usual: dict[str, str] = dataclasses.field(default_factory=dict)
    aside: bool = False

    @property
    def unavailable(self) -> bool:
        """Return whether plain PyTorch cannot provide the value, so that lines that need it are
        commented out.
        """
        return self.aside or (self.is_dropped and not self.value)

    @property
    def is_dropped(self) -> bool:
        return self.kind == "nothing" and not self.write

    @property
    def attribute(self) -> bool:
        """Return whether the text describes only the part before the dot."""
        return "{self}" in self.write and self.write.count("{") == 1


def named(full: str) -> Any:
    """Return the public object with a full name, or None if there is none."""
    parts = full.split(".")[1:]
    value: Any = poptorch
    if parts[:1] == ["Options"] and len(parts) > 1:
        value, parts = poptorch.Options(), parts[1:]  # an instance has the groups and setters
    for part in parts:
        value = getattr(value, part, _ABSENT)
    return None if value is _ABSENT else value


@functools.cache
def meaning(full: str) -> Meaning | None:
    """Return what a full name means, or None if it is not a name of PopTorch."""
    package, _, name = full.partition(".")
    if package not in PACKAGES or not name:
        return None
    if package != "poptorch":
        general = _TABLE["general"]
        return _row(general["popart" if package == "popart" else "name"], own=False)
    parts = name.split(".")
    if name in ROWS:
        return _row(ROWS[name], own=True)
    least = 1 if parts[0] in _OWNERS else 0
    for count in range(len(parts) - 1, least, -1):
        if row := ROWS.get(".".join(parts[:count])):
            return _row(row, own=False)
    general = _TABLE["general"].get(_sort(full, name))
    return None if general is None else _row(general, own=False)


def here(full: str) -> str:
    """Return what a name does in this library: the sentence of its option or docstring."""
    if row := _options().get(full.removeprefix("poptorch.Options.")):
        return row.sentence + (" No effect here." if row.effect in IDLE else "")
    value = named(full) if full.startswith("poptorch.") else None
    text = "" if value is None else inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "")


def changed_by_key(key: str) -> str:
    """Return what a key of ``_Popart`` does if it changes results, and an empty text otherwise."""
    row = _options().get(f'_Popart.set("{key}")')
    return row.sentence if row is not None and row.effect is RESULTS else ""


def helpers(loops: bool) -> dict[str, str]:
    """Return the code that new scripts begin with, by name and in order."""
    return {**_TABLE["helpers"]["loops" if loops else "flat"], **_TABLE["helpers"]["both"]}


def _row(row: dict[str, Any], own: bool) -> Meaning:
    fields = {name: value for name, value in row.items() if name not in ("of", "class")}
    return Meaning(row["class"], own=own, **fields)


def _sort(full: str, name: str) -> str:
    """Return the general row of a name, or None for names that the model or torch's class
    defines.
    """
    if name.startswith("Options."):
        row = _options().get(name.removeprefix("Options."))
        return "option" if row is None or row.effect is RESULTS else "hint"
    value = named(full)
    if name.startswith("PoplarExecutor."):
        own = value is not None and not hasattr(torch.nn.Module, name.split(".")[1])
        return "executor" if own else ""
    if name.startswith(("DataLoader.", "optim.Optimizer.")):
        return ""
    owner = value if isinstance(value, type) else type(value)
    if issubclass(owner, enum.Enum):
        return "enum"
    return "error" if issubclass(owner, BaseException) else "name"


@functools.cache
def _options() -> dict[str, OptionRow]:
    return {option: row for option, _, row in settings(poptorch.Options())}
