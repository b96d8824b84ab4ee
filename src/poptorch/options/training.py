"""``opts.Training``: gradient accumulation and reduction (PopTorch user guide, "Options")."""

from __future__ import annotations

from typing import Self

from .._base.errors import InvalidValue
from ..enums import MeanReductionStrategy, ReductionType
from .check import refuse
from .container import Container
from .legacy_names import deprecated
from .popart import _PopartOptions


class _TrainingOptions(Container):
    """How gradients are accumulated and combined.

    Attributes:
        gradient_accumulation: micro-batches per optimiser step.
        accumulation_and_replication_reduction_type: how they are combined.
        meanAccumulationAndReplicationReductionStrategy: where a mean divides.
    """

    gradient_accumulation: int
    accumulation_and_replication_reduction_type: ReductionType
    meanAccumulationAndReplicationReductionStrategy: MeanReductionStrategy
    _popart_options: _PopartOptions

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches per optimiser step (default 1; checked at compile).

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        return self.set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Combine gradients over accumulation steps, replicas and processes by Mean or Sum.

        Independent of the reduction inside the user's loss. Default Mean.

        Raises:
            InvalidValue: neither ``ReductionType.Mean`` nor ``.Sum`` (a ``ValueError``).
        """
        accepted = (ReductionType.Mean, ReductionType.Sum)
        if not isinstance(reduction_type, ReductionType) or reduction_type not in accepted:
            refuse(
                InvalidValue,
                "The reduction type must be set to ReductionType.Mean or ReductionType.Sum",
                got=repr(reduction_type),
            )
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Choose where the division of a mean takes place, for G steps and R replicas.

        ``Running`` keeps a running mean in the accumulator; ``Post`` (the default) sums, then
        divides by G x R; ``PostAndLoss`` divides the loss gradient by R before the backward pass
        and the sum by G at the end. They differ in the rounding and overflow of half precision.

        Raises:
            AssertionFailure: not a ``MeanReductionStrategy`` (an ``AssertionError``).
        """
        return self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adapt the loss-scale factor during training; it becomes optimiser state."""
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Hint: spread convolutions over the tiles from varying start tiles.

        Shares the ``convolutionOptions`` key with ``Precision.setPartialsType``: the last call
        wins.
        """
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})
        return self

    def accumulationReductionType(self, reduction_type: ReductionType) -> Self:
        """Set the reduction as releases 2.0 and 2.1 did.

        Deprecated: :meth:`accumulationAndReplicationReductionType`.
        """
        deprecated(
            "Training.accumulationReductionType", "Training.accumulationAndReplicationReductionType"
        )
        return self.accumulationAndReplicationReductionType(reduction_type)
