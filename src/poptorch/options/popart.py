"""``opts._Popart``: settings of the backend compiler, passed through untyped."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Self

from .check import expect
from .freezable import Freezable
from .legacy_names import deprecated
from .show import show

INITIAL = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}


class _PopartOptions(Freezable):
    """Keys and values for the backend compiler; nothing is checked before the first compile."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = dict(INITIAL)

    @property
    def options(self) -> dict[str, Any]:
        """What was set, as the plain dictionary that holds it."""
        return self._options

    def set(self, key: str, value: Any) -> Self:
        """Store any value under any key; both are checked at the first compile.

        Raises:
            InvalidAttribute: the options are frozen (an ``AttributeError``).
        """
        expect("key", key, str)
        self._check_writable(key)
        self._options[key] = int(value) if isinstance(value, IntEnum) else value  # as in files
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Replace the engine options, a dictionary of strings."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Switch rewriting patterns on or off, over a base level.

        Args:
            patterns: pattern name to whether it is on.
            level: 0 none, 1 minimal, 2 default, 3 all.

        Raises:
            AssertionFailure: ``patterns`` is no dict or ``level`` no int (``AssertionError``).
        """
        expect("patterns", patterns, dict)
        expect("level", level, int)
        return self.set("patterns", patterns).set("patterns_level", level)

    def Set(self, key: str, value: Any) -> Self:
        """Store a value under the name of mid-2020. Deprecated: ``set``."""
        deprecated("_Popart.Set", "_Popart.set")
        return self.set(key, value)

    def __repr__(self) -> str:
        pairs = sorted((str(key), show(value)) for key, value in self._options.items())
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in pairs)})"
