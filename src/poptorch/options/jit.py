"""``opts.Jit``: the tracer switch of the 1.x releases, kept for old scripts."""

from __future__ import annotations

from typing import Self

from .container import Container
from .legacy_names import deprecated_without_effect


class _JitOptions(Container):
    """Holds nothing: every model is traced."""

    def traceModel(self, trace_model: bool) -> Self:
        """Do nothing but warn: both values of the 1.x releases mean the one tracer. Deprecated."""
        self._check_writable("traceModel")
        deprecated_without_effect("Jit.traceModel", "every model is traced")
        return self
