"""Define ``opts.Training``, ``opts.Precision`` and ``opts.Jit``: options that change results."""

from __future__ import annotations

from typing import Any, Self

import torch

from .._base import log
from .._base.errors import AssertionFailure, InvalidValue
from .._base.keywords import also_called
from ..enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from .container import Container
from .option_table import (
    ESTIMATES,
    HINT,
    MISSING,
    OF_FIELD,
    RESULTS,
    RULES,
    PopartKey,
    Private,
    Value,
    deprecated_without_effect,
    expect,
    option,
    row,
)
from .popart import _PopartOptions, mean_or_sum

_AUTOCAST_RULES = ("fp16", "fp32", "promote", "demote")


class _TrainingOptions(Container):
    """How gradients are accumulated and combined."""

    gradient_accumulation: int
    accumulation_and_replication_reduction_type: ReductionType
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy
    _popart: _PopartOptions
    # name in release 2.1
    _renamed = {"accumulationReductionType": "accumulationAndReplicationReductionType"}

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    @option(RESULTS, "gradient_accumulation", 1, decides="loops.accumulation", least=1)
    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches per optimizer step."""

    @option(
        RESULTS,
        "accumulation_and_replication_reduction_type",
        OF_FIELD,
        check=mean_or_sum,
        field="reduction.type",
    )
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Combine gradients over accumulation steps and replicas by their mean or sum.

        This does not change the reduction inside your loss function.

        Raises:
            InvalidValue: neither ``ReductionType.Mean`` nor ``.Sum`` (a ``ValueError``).
        """

    @option(
        RESULTS,
        "meanAccumulationAndReplicationReductionStrategy",
        OF_FIELD,
        field="reduction.strategy",
    )
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Choose where the division of a mean takes place.

        For G steps and R replicas: ``Running`` keeps a running mean in the accumulator. ``Post``
        sums, then divides by G x R. ``PostAndLoss`` divides the loss gradient by R before the
        backward pass, and the sum by G at the end. In half precision they differ in rounding and
        overflow.
        """

    @option(
        RESULTS,
        "automaticLossScalingSettings.enabled",
        store=PopartKey,
        field="reduction.automatic_loss_scaling",
    )
    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adapt the loss-scale factor during training; the factor becomes optimizer state.

        The factor follows the gradients of float16 weights. Without such weights, this option has
        no effect and you get a warning.
        """

    @option(
        HINT,
        "convolutionOptions",
        store=PopartKey,
        part="enableConvDithering",
        kind=bool,
        check=lambda enabled: {"enableConvDithering": enabled},
    )
    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Spread convolutions over the tiles from varying start tiles.

        ``Precision.setPartialsType`` uses the same key, ``convolutionOptions``: the last call wins.
        """


def _names_by_rule(policy: Any) -> dict[str, list[str]]:
    if not all(hasattr(policy, rule) for rule in _AUTOCAST_RULES):
        raise AssertionFailure(
            "Unexpected type for policy",
            got=repr(policy),
            fix=("pass an instance of poptorch.autocasting.Policy"),
        )
    return {rule: [_name(f) for f in getattr(policy, rule)] for rule in _AUTOCAST_RULES}


def _name(function: Any) -> str:
    """Return a function's name; for a layer, the name of the function that it calls."""
    if isinstance(function, str):
        return function
    name: str = function.__name__
    return name.lower() if isinstance(function, type) else name


class _PrecisionOptions(Container):
    """Number formats of the device."""

    narrow_64bit: bool
    half_float_casting: HalfFloatCastingBehavior
    autocast_enabled: bool
    autocast_policy: dict[str, list[str]]
    check_indices: bool
    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    @option(RESULTS, "narrow_64bit", OF_FIELD, field="precision.narrow_64bit")
    def narrow64Bit(self, enabled: bool = True) -> Self:
        """Return 64-bit results as 32-bit, as PopTorch did, or keep torch's dtypes.

        This affects outputs of types int64 and float64. Not a PopTorch option.
        """

    @row(
        RESULTS,
        Value(
            "half_float_casting",
            OF_FIELD,
            field="precision.half_float_casting",
        ),
    )
    def halfFloatCasting(self, half_float_casting: Any) -> Self:
        """Choose how operands of mixed half and float types are cast. Deprecated: causes a warning.

        Args:
            half_float_casting: ``HalfFloatCastingBehavior.HalfUpcastToFloat`` computes in float, as
                torch does. ``FloatDowncastToHalf`` computes in half, in layers too. Any other value
                also means half, except that weights of layers follow the activations.
        """
        known = HalfFloatCastingBehavior
        is_known = isinstance(half_float_casting, int) and half_float_casting in [*known]
        choice = known(half_float_casting) if is_known else known.Default
        self.set(half_float_casting=choice)
        log.python.warning(
            (
                "[Deprecated] Precision.halfFloatCasting is deprecated: mixed half and float "
                "operands of this model are computed in %s"
            ),
            "float" if choice is known.HalfUpcastToFloat else "half",
        )
        return self

    @also_called(autocast_enabled="enabled")
    @option(
        RESULTS,
        "autocast_enabled",
        OF_FIELD,
        field="precision.autocast",
        instead="torch.autocast(..., enabled=)",
    )
    def autocastEnabled(self, enabled: bool) -> Self:
        """Let ``poptorch.autocast`` take effect, or not. Deprecated: causes a warning."""

    @also_called(autocast_policy="policy")
    @option(
        RESULTS,
        "autocast_policy",
        {},
        check=_names_by_rule,
        field="precision.autocast_policy",
        frozen=lambda names: tuple(tuple(names[rule]) for rule in _AUTOCAST_RULES if names),
        instead="casts in forward: tensor.half(), tensor.float()",
    )
    def autocastPolicy(self, policy: Any) -> Self:
        """Choose which functions ``poptorch.autocast`` casts, and to which type. Deprecated: causes
        a warning.

        Args:
            policy: a ``poptorch.autocasting.Policy``.
        """

    @option(
        RESULTS,
        "enableFloatingPointChecks",
        store=PopartKey,
        field="precision.floating_point_exceptions",
    )
    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Raise an error if a run divides by 0, compares NaN, overflows or leaves a
        function's domain.
        """

    @option(RULES, "check_indices", OF_FIELD, field="precision.check_indices")
    def checkIndices(self, enabled: bool = True) -> Self:
        """Check labels and indices among the inputs before each call, and raise an error if one is
        out of range.

        The check reads each such input once, which takes 0.5 ms for a million values. Not a
        PopTorch option.
        """

    @option(
        RESULTS,
        "enableStochasticRounding",
        store=PopartKey,
        field="precision.stochastic_rounding",
    )
    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round float16 results up or down at random, so that their mean is unbiased."""

    @row(
        ESTIMATES,
        PopartKey("partialsTypeMatMuls", decides="runtime.half_matmuls"),
        PopartKey("convolutionOptions", part="partialsType", decides="runtime.half_convolutions"),
    )
    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Choose the type in which products accumulate on an IPU; here it is always float32.

        ``Training.setConvolutionDithering`` uses the same key, ``convolutionOptions``: the last
        call wins.

        Raises:
            InvalidValue: neither ``torch.float32`` nor ``torch.float16`` (a ``ValueError``).
        """
        self._popart._set_partials(dtype)
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Warn that this option has no effect: running statistics keep the dtype of their buffers.
        Deprecated.

        Raises:
            InvalidValue: not a bool (a ``ValueError``).
        """
        return self._statistics("runningStatisticsAlwaysFloat", value)

    def runningVarianceAlwaysFloat(self, value: bool) -> Self:
        """Warn that this option has no effect. Releases 2.0 and 2.1 used this name for
        ``runningStatisticsAlwaysFloat``. Deprecated.
        """
        return self._statistics("runningVarianceAlwaysFloat", value)

    def _statistics(self, name: str, value: bool) -> Self:
        self._check_writable(name)
        if not isinstance(value, bool):
            raise InvalidValue(
                f"{name} must be set to True or False",
                got=repr(value),
                fix="remove the call, because this option has no effect",
            )
        deprecated_without_effect(
            f"Precision.{name}", "running statistics have the dtype of the module's buffers"
        )
        return self


class _JitOptions(Container):
    """The choice of tracer in old releases. Every model is traced."""

    _trace_model: bool

    @row(MISSING, Private("_trace_model", True))
    def traceModel(self, trace_model: bool) -> Self:
        """Trace the model, which is always done: Python branches and numbers become constants.

        Deprecated: True warns immediately, False warns when a model is wrapped.
        """
        self._check_writable("traceModel")
        expect("trace_model", trace_model, (bool, int))
        if trace_model:
            deprecated_without_effect("Jit.traceModel", "every model is traced")
        self._trace_model = bool(trace_model)
        return self
