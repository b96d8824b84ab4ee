"""``opts.Precision``: number formats, rounding, floating-point exceptions (options.md 5.2)."""

from __future__ import annotations

from typing import Any, Self

import torch

from .._base.errors import InvalidValue
from .check import expect, refuse
from .container import Container
from .legacy_names import deprecated_without_effect
from .popart import _PopartOptions

_PARTIALS = {torch.float32: "float", torch.float16: "half"}


class _PrecisionOptions(Container):
    """Number formats of the device.

    Attributes:
        narrow_64bit: whether 64-bit results come back as 32-bit.
    """

    narrow_64bit: bool
    _popart_options: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(narrow_64bit=True)

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Fail a run that divides by zero, leaves a function's domain, compares NaN or overflows.

        Raises:
            AssertionFailure: not a bool (an ``AssertionError``).
        """
        expect("enabled", enabled, bool)
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round float16 results up or down at random, so that their mean is unbiased."""
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Choose the type in which matrix products and convolutions accumulate.

        Shares the ``convolutionOptions`` key with ``Training.setConvolutionDithering``: the last
        call wins.

        Raises:
            InvalidValue: neither ``torch.float32`` nor ``torch.float16`` (a ``ValueError``).
        """
        if not isinstance(dtype, torch.dtype) or dtype not in _PARTIALS:
            refuse(
                InvalidValue,
                "The partials type must be torch.float or torch.half",
                got=repr(dtype),
            )
        self._popart_options.set("partialsTypeMatMuls", _PARTIALS[dtype])
        self._popart_options.set("convolutionOptions", {"partialsType": _PARTIALS[dtype]})
        return self

    def narrow64Bit(self, enabled: bool = True) -> Self:
        """Return 64-bit results as 32-bit, as PopTorch did (the default), or keep torch's dtypes.

        Not a PopTorch option. Narrowed are the outputs of types int64, float64 and complex128.

        Raises:
            AssertionFailure: not a bool (an ``AssertionError``).
        """
        return self.set(narrow_64bit=enabled)

    def halfFloatCasting(self, half_float_casting: Any) -> Self:
        """Do nothing but warn: mixed half and float operands upcast as in torch. Deprecated."""
        self._check_writable("halfFloatCasting")
        deprecated_without_effect(
            "Precision.halfFloatCasting", "mixed half and float operands upcast, as in torch"
        )
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Do nothing but warn: running statistics have the buffers' dtype. Deprecated.

        Raises:
            InvalidValue: not a bool (a ``ValueError``).
        """
        return self._statistics("runningStatisticsAlwaysFloat", value)

    def runningVarianceAlwaysFloat(self, value: bool) -> Self:
        """Do nothing but warn; the name of releases 2.0 and 2.1. Deprecated."""
        return self._statistics("runningVarianceAlwaysFloat", value)

    def _statistics(self, name: str, value: bool) -> Self:
        self._check_writable(name)
        if not isinstance(value, bool):
            refuse(InvalidValue, f"{name} must be set to True or False", got=repr(value))
        deprecated_without_effect(
            f"Precision.{name}", "running statistics have the dtype of the module's buffers"
        )
        return self

    def autocastEnabled(self, enabled: bool) -> Self:
        """Do nothing but warn; an option of releases 2.1 to 3.0. Deprecated."""
        return self._autocast("autocastEnabled")

    def autocastPolicy(self, policy: Any) -> Self:
        """Do nothing but warn; an option of releases 2.1 to 3.0. Deprecated."""
        return self._autocast("autocastPolicy")

    def _autocast(self, name: str) -> Self:
        self._check_writable(name)
        deprecated_without_effect(
            f"Precision.{name}", "convert the model with .half() or use torch's own casts"
        )
        return self
