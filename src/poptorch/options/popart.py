"""Define ``opts._Popart``: settings of the backend compiler, which are checked when a model is
compiled.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import torch

from .._base import log
from .._base.errors import Error, InvalidValue
from ..enums import MeanReductionStrategy, ReductionType
from .container import Container
from .option_table import (
    HINT,
    MISSING,
    RESULTS,
    RULES,
    UNSET,
    Effect,
    OptionRow,
    PopartKey,
    deprecated,
    expect,
)

INITIAL = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KEYS = {kind: frozenset(keys.split()) for kind, keys in _TABLES["keys"].items()}
LAST_MEMBER: dict[str, int] = _TABLES["last_member"]
WANTS_REPORT = (
    "autoReport.all", "autoReport.outputGraphProfile", "autoReport.outputExecutionProfile",
)  # fmt: skip
REPORT_KEYS = frozenset({*WANTS_REPORT, "autoReport.directory", "debug.allowOutOfMemory"})
"""The engine options that have an effect here."""
NO_EFFECT = "Accepted without effect: it configures a compiler that poptorch does not use."


def _key_row(key: str, effect: Effect = HINT, sentence: str = NO_EFFECT, **more: Any) -> OptionRow:
    value = PopartKey(key, INITIAL.get(key, UNSET), **more)
    return OptionRow(f'_Popart.set("{key}")', effect, (value,), sentence)


# Keys without a setter that have an effect, or a partial effect.
_READ = (
    _key_row(
        "accumulationAndReplicationReductionType",
        RESULTS,
        "Choose how gradients are combined: 0 for the sum, 1 for the mean.",
        field="reduction.type",
        frozen=lambda kind: mean_or_sum(ReductionType(kind)),
    ),
    _key_row(
        "autoRecomputation",
        RULES,
        "Recompute activations in the backward pass: 0 never, 1 to 4 if it saves memory.",
        field="recompute",
        frozen=bool,
    ),
    _key_row(
        "groupNormStridedChannelGrouping",
        RESULTS,
        "Let each group of a GroupNorm take every n-th channel instead of neighbouring ones.",
        field="precision.strided_group_norm",
    ),
    _key_row(
        "meanAccumulationAndReplicationReductionStrategy",
        RESULTS,
        "Set where the division of a mean takes place, overriding the other options.",
        field="reduction.strategy",
        frozen=MeanReductionStrategy,
    ),
    _key_row("engineOptions", others=REPORT_KEYS, here=True),
    _key_row("convolutionOptions", others=frozenset({"enableConvDithering", "partialsType"})),
    _key_row(
        "saveInitializersToFile",
        MISSING,
        "Write the weights of an exported ONNX model to a file. No such model is exported.",
    ),
    _key_row("logDir", MISSING, "Ignored, as in PopTorch; use Options.logDir."),
)


_PARTIALS = {torch.float32: "float", torch.float16: "half"}


class _PopartOptions(Container):
    """Keys and values for the backend compiler. The first compilation checks them."""

    _renamed = {"Set": "set"}

    def __init__(self) -> None:
        super().__init__(**INITIAL)

    @property
    def options(self) -> dict[str, Any]:
        """The dictionary of values that were set."""
        return self._values

    def set(self, key: str, value: Any) -> Self:  # type: ignore[override]
        """Store a value under a key. The first compilation checks both.

        Raises:
            InvalidAttribute: the options are frozen (an ``AttributeError``).
        """
        expect("key", key, str)
        self._check_writable(key)
        # configuration files contain integers, too
        self._values[key] = int(value) if isinstance(value, IntEnum) else value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Replace the engine options, a dictionary of strings."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Switch rewriting patterns on or off, over a base level.

        Args:
            patterns: by name, whether a pattern is on.
            level: 0 none, 1 minimal, 2 default, 3 all.

        Raises:
            AssertionFailure: ``patterns`` is not a dict, or ``level`` is not an int (an
                ``AssertionError``).
        """
        expect("patterns", patterns, dict)
        expect("level", level, int)
        return self.set("patterns", patterns).set("patterns_level", level)

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Choose the type of partial sums. Deprecated: ``Precision.setPartialsType``."""
        deprecated("_Popart.setPartialsType", "Precision.setPartialsType")
        return self._set_partials(dtype)

    def _set_partials(self, dtype: torch.dtype) -> Self:
        if not isinstance(dtype, torch.dtype) or dtype not in _PARTIALS:
            raise InvalidValue(
                "The partials type must be torch.float or torch.half",
                got=repr(dtype),
                fix="call options.Precision.setPartialsType(torch.float) or (torch.half)",
            )
        self.set("partialsTypeMatMuls", _PARTIALS[dtype])
        return self.set("convolutionOptions", {"partialsType": _PARTIALS[dtype]})


def mean_or_sum(kind: Any) -> ReductionType:
    accepted = (ReductionType.Mean, ReductionType.Sum)
    if not isinstance(kind, ReductionType) or kind not in accepted:
        raise InvalidValue(
            "The reduction type must be set to ReductionType.Mean or ReductionType.Sum",
            got=repr(kind),
            fix="pass poptorch.ReductionType.Mean or poptorch.ReductionType.Sum",
        )
    return kind


def key_rows(covered: set[str]) -> Iterator[OptionRow]:
    read = {row.values[0].name: row for row in _READ}
    for key in sorted(set().union(*KEYS.values()) - covered):
        yield read.get(key) or _key_row(key)


def validate_popart(options: dict[Any, Any]) -> None:
    """Check the values that were set. The type of a value chooses its table: a bool is not an int,
    and an int not a float.
    """
    for key, value in options.items():
        kind = _kind(value)
        if kind is None:
            raise Error(
                f"Unknown value type for the option {key!r}",
                got=repr(value),
                fix="use a bool, an int, a float, a string, or a list of one of these",
            )
        if key not in KEYS[kind]:
            raise Error(f"Unknown {kind} option: {key}", got=f"{key} = {value!r}", fix=_fix(key))
        end = LAST_MEMBER.get(key)
        for item in value if kind == "list" else [value]:
            if end is not None and isinstance(item, int) and not 0 <= item <= end:
                raise Error(
                    f"The value of _Popart option {key!r} is out of range",
                    got=str(item),
                    fix=f"use an integer from 0 to {end}",
                )
        if key == "logDir":
            log.python.warning("_Popart.set('logDir', ...) is ignored: use Options.logDir")


def _kind(value: Any) -> str | None:
    scalars = {bool: "bool", int: "int", float: "float", str: "string"}
    for kind, name in scalars.items():  # bool precedes int here, because a bool is an int
        if isinstance(value, kind):
            return name
    if isinstance(value, (list, set, frozenset, tuple)):
        return "list" if all(_kind(item) in ("string", "int") for item in value) else None
    if isinstance(value, dict):
        plain = all(
            isinstance(key, str) and _kind(item) in scalars.values() for key, item in value.items()
        )
        return "dictionary" if plain else None
    return None


def _fix(key: Any) -> str:
    tables = [name for name, table in KEYS.items() if key in table]
    if tables:
        return f"{key} takes a value of type {tables[0]}"
    every = sorted(set().union(*KEYS.values()))
    close = difflib.get_close_matches(str(key), every, n=3)
    return (
        f"did you mean {' or '.join(close)}?"
        if close
        else "remove this option, because nothing reads it"
    )
