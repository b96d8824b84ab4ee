"""``opts.Training``: gradient accumulation and reduction (PopTorch user guide, "Options")."""

# mypy: disable-error-code="empty-body"
# The decorator writes the setters: their bodies would all be the same.

from __future__ import annotations

from typing import Self

from ..enums import MeanReductionStrategy, ReductionType
from .check import mean_or_sum
from .container import Container
from .legacy_names import deprecated
from .popart import _PopartOptions
from .table import HINT, RESULTS, Backend, Value, option


class _TrainingOptions(Container):
    """How gradients are accumulated and combined."""

    gradient_accumulation: int
    accumulation_and_replication_reduction_type: ReductionType
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy
    _popart: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__()

    @option(RESULTS, Value("gradient_accumulation", 1, decides="loops.accumulation", least=1))
    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches per optimiser step."""

    @option(
        RESULTS,
        Value(
            "accumulation_and_replication_reduction_type",
            ReductionType.Mean,
            check=mean_or_sum,
            field="reduction.type",
        ),
    )
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Combine gradients over accumulation steps and replicas by their mean or sum.

        Independent of the reduction inside the user's loss.

        Raises:
            InvalidValue: neither ``ReductionType.Mean`` nor ``.Sum`` (a ``ValueError``).
        """

    @option(
        RESULTS,
        Value(
            "meanAccumulationAndReplicationReductionStrategy",
            MeanReductionStrategy.Post,
            field="reduction.strategy",
        ),
    )
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Choose where the division of a mean takes place.

        For G steps and R replicas, ``Running`` keeps a running mean in the accumulator; ``Post``
        sums, then divides by G x R; ``PostAndLoss`` divides the loss gradient by R before the
        backward pass and the sum by G at the end. They differ in the rounding and overflow of half
        precision.
        """

    @option(
        RESULTS,
        Backend(
            "automaticLossScalingSettings.enabled",
            kind=bool,
            field="reduction.automatic_loss_scaling",
        ),
    )
    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adapt the loss-scale factor during training; it becomes optimiser state.

        It follows the gradients of float16 weights. Where none are trained a warning says that it
        does nothing.
        """

    @option(
        HINT,
        Backend(
            "convolutionOptions",
            part="enableConvDithering",
            kind=bool,
            check=lambda enabled: {"enableConvDithering": enabled},
        ),
    )
    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Spread convolutions over the tiles from varying start tiles.

        Shares the ``convolutionOptions`` key with ``Precision.setPartialsType``: the last call
        wins.
        """

    def accumulationReductionType(self, reduction_type: ReductionType) -> Self:
        """Set the reduction as releases 2.0 and 2.1 did.

        Deprecated: ``accumulationAndReplicationReductionType``.
        """
        deprecated(
            "Training.accumulationReductionType", "Training.accumulationAndReplicationReductionType"
        )
        return self.accumulationAndReplicationReductionType(reduction_type)
