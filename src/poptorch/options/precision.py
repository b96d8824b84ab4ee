"""``opts.Precision``: number formats, rounding, floating-point exceptions."""

# mypy: disable-error-code="empty-body"
# The decorator writes the setters: their bodies would all be the same.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue
from ..enums import HalfFloatCastingBehavior
from .container import Container
from .legacy_names import deprecated_without_effect
from .popart import _PopartOptions
from .table import ESTIMATES, RESULTS, RULES, Backend, Value, option, row

_AUTOCAST_RULES = ("fp16", "fp32", "promote", "demote")
_PARTIALS = {torch.float32: "float", torch.float16: "half"}


def _names_by_rule(policy: Any) -> dict[str, list[str]]:
    if not all(hasattr(policy, rule) for rule in _AUTOCAST_RULES):
        raise AssertionFailure(
            "Unexpected type for policy", got=repr(policy), fix="pass a poptorch.autocasting.Policy"
        )
    return {rule: [_name(f) for f in getattr(policy, rule)] for rule in _AUTOCAST_RULES}


def _name(function: Any) -> str:
    """A function by its name; a layer by that of the function that it calls."""
    if isinstance(function, str):
        return function
    name: str = function.__name__
    return name.lower() if isinstance(function, type) else name


def _in_order(names: dict[str, Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[rule]) for rule in _AUTOCAST_RULES if names)


class _PrecisionOptions(Container):
    """Number formats of the device."""

    narrow_64bit: bool
    half_float_downcast: bool
    autocast_enabled: bool
    autocast_policy: dict[str, list[str]]
    check_indices: bool
    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    @option(RESULTS, Value("narrow_64bit", True, field="precision.narrow_64bit"))
    def narrow64Bit(self, enabled: bool = True) -> Self:
        """Return 64-bit results as 32-bit, as PopTorch did, or keep torch's dtypes.

        Not a PopTorch option. Narrowed are the outputs of types int64 and float64.
        """

    @row(RESULTS, Value("half_float_downcast", True, field="precision.half_float_downcast"))
    def halfFloatCasting(self, half_float_casting: Any) -> Self:
        """Choose what mixed half and float operands become. Deprecated: it warns.

        Args:
            half_float_casting: ``HalfFloatCastingBehavior.HalfUpcastToFloat`` computes them in
                float, as torch and release 3 do. Everything else leaves them in half.
        """
        downcast = half_float_casting != HalfFloatCastingBehavior.HalfUpcastToFloat
        self.set(half_float_downcast=downcast)
        log.python.warning(
            "[Deprecated] Precision.halfFloatCasting is deprecated: mixed half and float "
            "operands of this model are computed in %s",
            "half" if downcast else "float",
        )
        return self

    @option(
        RESULTS,
        Value("autocast_enabled", True, field="precision.autocast"),
        instead="torch.autocast(..., enabled=)",
    )
    def autocastEnabled(self, enabled: bool) -> Self:
        """Let ``poptorch.autocast`` take effect, or not. Deprecated: it warns."""

    @option(
        RESULTS,
        Value(
            "autocast_policy",
            {},
            check=_names_by_rule,
            field="precision.autocast_policy",
            frozen=_in_order,
        ),
        instead="casts in forward: tensor.half(), tensor.float()",
    )
    def autocastPolicy(self, policy: Any) -> Self:
        """Choose which functions ``poptorch.autocast`` casts for. Deprecated: it warns.

        Args:
            policy: a ``poptorch.autocasting.Policy``.
        """

    @option(
        RESULTS,
        Backend(
            "enableFloatingPointChecks", kind=bool, field="precision.floating_point_exceptions"
        ),
    )
    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Fail a run that divides by 0, compares NaN, overflows or leaves a function's domain."""

    @option(RULES, Value("check_indices", True, field="precision.check_indices"))
    def checkIndices(self, enabled: bool = True) -> Self:
        """Look at labels and indices among the inputs before a call runs: those out of range raise.

        Not a PopTorch option. It reads each such input once, about 0.5 ms for a million of them.
        """

    @option(
        RESULTS,
        Backend("enableStochasticRounding", kind=bool, field="precision.stochastic_rounding"),
    )
    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round float16 results up or down at random, so that their mean is unbiased."""

    @row(
        ESTIMATES,
        Backend("partialsTypeMatMuls", decides="runtime.half_matmuls"),
        Backend("convolutionOptions", part="partialsType", decides="runtime.half_convolutions"),
    )
    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Choose the type in which products accumulate on an IPU; here it is always float32.

        Shares the ``convolutionOptions`` key with ``Training.setConvolutionDithering``: the last
        call wins.

        Raises:
            InvalidValue: neither ``torch.float32`` nor ``torch.float16`` (a ``ValueError``).
        """
        if not isinstance(dtype, torch.dtype) or dtype not in _PARTIALS:
            raise InvalidValue(
                "The partials type must be torch.float or torch.half",
                got=repr(dtype),
            )
        self._popart.set("partialsTypeMatMuls", _PARTIALS[dtype])
        self._popart.set("convolutionOptions", {"partialsType": _PARTIALS[dtype]})
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
            raise InvalidValue(f"{name} must be set to True or False", got=repr(value))
        deprecated_without_effect(
            f"Precision.{name}", "running statistics have the dtype of the module's buffers"
        )
        return self
