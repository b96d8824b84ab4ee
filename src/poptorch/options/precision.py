"""``opts.Precision``: number formats, rounding, floating-point exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from .._base import log
from .._base.errors import InvalidValue
from ..enums import HalfFloatCastingBehavior
from .check import expect, refuse
from .container import Container
from .legacy_names import deprecated, deprecated_without_effect
from .popart import _PopartOptions

AUTOCAST_RULES = ("fp16", "fp32", "promote", "demote")
_PARTIALS = {torch.float32: "float", torch.float16: "half"}


class _PrecisionOptions(Container):
    """Number formats of the device.

    Attributes:
        narrow_64bit: whether 64-bit results come back as 32-bit.
        half_float_downcast: whether mixed half and float operands are computed in half.
        autocast_enabled: whether ``poptorch.autocast`` has an effect.
        autocast_policy: names of functions by rule, empty for torch's own choice.
    """

    narrow_64bit: bool
    half_float_downcast: bool
    autocast_enabled: bool
    autocast_policy: dict[str, list[str]]
    _popart_options: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            narrow_64bit=True,
            half_float_downcast=True,
            autocast_enabled=True,
            autocast_policy={},
        )

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

        A hint: on a CPU they always accumulate in float32.

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
        """Choose what mixed half and float operands become. Deprecated: it warns.

        Args:
            half_float_casting: ``HalfFloatCastingBehavior.HalfUpcastToFloat`` computes them in
                float, as torch and release 3 do. Everything else leaves them in half.
        """
        downcast = half_float_casting is not HalfFloatCastingBehavior.HalfUpcastToFloat
        self._check_writable("halfFloatCasting")
        self.set(half_float_downcast=downcast)
        log.python.warning(
            "[Deprecated] Precision.halfFloatCasting is deprecated: mixed half and float "
            "operands of this model are computed in %s",
            "half" if downcast else "float",
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
        """Let ``poptorch.autocast`` take effect (the default), or not. Deprecated: it warns.

        Raises:
            AssertionFailure: not a bool (an ``AssertionError``).
        """
        self.set(autocast_enabled=enabled)
        deprecated("Precision.autocastEnabled", "torch.autocast(..., enabled=)")
        return self

    def autocastPolicy(self, policy: Any) -> Self:
        """Choose which functions ``poptorch.autocast`` casts for. Deprecated: it warns.

        Args:
            policy: a ``poptorch.autocasting.Policy``.
        """
        rules = {rule: _names(getattr(policy, rule)) for rule in AUTOCAST_RULES}
        self.set(autocast_policy=rules)
        deprecated("Precision.autocastPolicy", "casts in forward: tensor.half(), tensor.float()")
        return self


def _names(functions: Sequence[Any]) -> list[str]:
    """Functions by name; a layer by that of the function that it calls."""
    return [f if isinstance(f, str) else _name(f) for f in functions]


def _name(function: Any) -> str:
    return function.__name__.lower() if isinstance(function, type) else function.__name__
