"""Spellings of earlier releases on ``Options``; each warns once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ..enums import OutputMode
from .check import is_on
from .legacy_names import deprecated
from .own import OwnOptions
from .popart import _PopartOptions
from .precision import _PrecisionOptions
from .strategies import PipelinedExecution, ShardedExecution

RENAMED_VALUES = {"anchor_mode": "output_mode", "anchor_return_period": "output_return_period"}


class LegacyOptions(OwnOptions):
    """The methods, properties and attributes that later releases renamed."""

    _popart: _PopartOptions
    _precision: _PrecisionOptions

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: int | None = None) -> Self:
        """Set the output mode. Deprecated: ``outputMode``."""
        deprecated("anchorMode", "outputMode")
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultAnchorMode(self) -> bool:
        """Tell whether the output mode is the default. Deprecated: ``defaultOutputMode``."""
        deprecated("defaultAnchorMode", "defaultOutputMode")
        return self.defaultOutputMode()

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
        anchor_mode: OutputMode | None = None,
        anchor_return_period: int | None = None,
    ) -> None:
        if anchor_mode is not None:
            deprecated("anchorTensor(anchor_mode=)", "output_mode=")
            output_mode = anchor_mode
        if anchor_return_period is not None:
            deprecated("anchorTensor(anchor_return_period=)", "output_return_period=")
            output_return_period = anchor_return_period
        super().anchorTensor(short_name, long_name, output_mode, output_return_period)

    anchorTensor.__doc__ = OwnOptions.anchorTensor.__doc__

    @property
    def Popart(self) -> _PopartOptions:
        """The backend compiler's settings. Deprecated: ``_Popart``."""
        deprecated("Options.Popart", "Options._Popart")
        return self._popart

    @property
    def GraphProcessing(self) -> _PrecisionOptions:
        """Number formats. Deprecated: ``Precision``."""
        deprecated("Options.GraphProcessing", "Options.Precision")
        return self._precision

    def enablePipelining(self, enabled: bool) -> Self:
        """Choose pipelined or sharded execution. Deprecated: ``setExecutionStrategy``."""
        deprecated("enablePipelining", "setExecutionStrategy")
        return self.setExecutionStrategy(
            PipelinedExecution() if is_on(enabled) else ShardedExecution()
        )

    def profile(self, enabled: bool) -> Self:
        """Switch profiling on. Deprecated: ``enableProfiling``."""
        deprecated("profile", "enableProfiling")
        return self.enableProfiling() if is_on(enabled) else self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(_current_name(name))

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(_current_name(name), value)


def _current_name(name: str) -> str:
    if name not in RENAMED_VALUES:
        return name
    deprecated(name, RENAMED_VALUES[name])
    return RENAMED_VALUES[name]
