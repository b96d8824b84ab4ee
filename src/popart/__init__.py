"""Provide PopART's enums that scripts pass to ``options._Popart.set``. PopART itself is not used.

The table of options (``docs/reference/options_table.md``) says what each key does, and
``options.withoutEffect()`` lists the keys that have no effect. Members have PopART's numbers.
Source: PopART's public Python API reference.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "AccumulateOuterFragmentSchedule", "BatchSerializationBatchSchedule", "RecomputationType",
    "SubgraphCopyingStrategy", "SyntheticDataMode", "VirtualGraphMode",
]  # fmt: skip


class AccumulateOuterFragmentSchedule(IntEnum):
    """``accumulateOuterFragmentSettings.schedule``: the order of updates after accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class BatchSerializationBatchSchedule(IntEnum):
    """``batchSerializationSettings.batchSchedule``: the order of a batch's parts."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class RecomputationType(IntEnum):
    """``autoRecomputation``: what the backward pass computes again."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class SubgraphCopyingStrategy(IntEnum):
    """``subgraphCopyingStrategy``: when a subgraph's inputs are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(IntEnum):
    """``syntheticDataMode``: what replaces data; use ``Options.enableSyntheticData`` here."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class VirtualGraphMode(IntEnum):
    """``virtualGraphMode``: how operators are assigned to chips."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3
