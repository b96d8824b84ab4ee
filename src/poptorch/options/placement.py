"""Translating the user's strategy and tensor locations into frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._base.errors import Error
from .._ir.spec import Location, Locations, NamedStage, Placement, Strategy
from ..enums import Liveness
from .distributed import data_share
from .strategies import (
    PipelinedExecution,
    ShardedExecution,
    _IExecutionStrategy,
    _IPhasedExecution,
)

_SERIAL_ONLY = (Liveness.OffChipAfterFwdNoOverlap, Liveness.OffChipAfterEachPhase)


def freeze_strategy(strategy: _IExecutionStrategy) -> Placement:
    """Return the frozen form of a strategy.

    Raises:
        Error: parallel phases on devices of the wrong parity, or a liveness that only serial
            phases have (PopTorch user guide, "Parallel execution").
    """
    if isinstance(strategy, _IPhasedExecution):
        return _freeze_phases(strategy)
    assert isinstance(strategy, PipelinedExecution)
    sharded = isinstance(strategy, ShardedExecution)
    return Placement(
        strategy=Strategy.SHARDED if sharded else Strategy.PIPELINED,
        auto_stage=strategy._auto_stage,
        stages=tuple(
            NamedStage(stage.blocks, number, ipu=stage._ipu)
            for number, stage in enumerate(strategy._all_stages)
        ),
        interleaved=strategy._interleaved and not sharded,
        first_release=strategy._first_release,
    )


def _freeze_phases(strategy: _IPhasedExecution) -> Placement:
    stages = tuple(
        NamedStage(stage.blocks, number, phase_number, stage._ipu)
        for phase_number, phase in enumerate(strategy._phases)
        for number, stage in enumerate(phase.stages)
    )
    if not strategy._serial:
        _check_parallel(strategy._tensors_liveness, stages)
    return Placement(
        strategy=Strategy.SERIAL_PHASED if strategy._serial else Strategy.PARALLEL_PHASED,
        auto_stage=None,
        stages=stages,
        separate_backward_phase=strategy._separate_backward_phase,
        liveness=strategy._tensors_liveness,
    )


def _check_parallel(liveness: Liveness, stages: tuple[NamedStage, ...]) -> None:
    if liveness in _SERIAL_ONLY:
        raise Error(f"Liveness.{liveness.name} is only supported for serial phase execution")
    for stage in stages:
        if stage.ipu is not None and stage.phase is not None and (stage.ipu - stage.phase) % 2:
            raise Error(
                "In parallel phased execution even phases must run on even IPUs and odd phases on "
                "odd IPUs",
                got=f"phase {stage.phase} with blocks {', '.join(stage.blocks)} on IPU {stage.ipu}",
            )


def freeze_locations(options: Any, phased: bool) -> Locations:
    """Return where tensors rest.

    Phased strategies rest everything off chip by default; sharding over replicas is ignored when
    there is one replica, in all processes (PopTorch user guide, "Parallel execution").
    """
    values: Mapping[str, Any] = options.TensorLocations._values
    replicas = options.replication_factor * data_share(options.Distributed)[1]

    def location(kind: str) -> Location:
        stored = values.get(f"location_{kind}", {})
        return Location(
            on_chip=bool(stored.get("onChip", not phased)),
            sharded=replicas > 1 and bool(stored.get("useReplicatedTensorSharding", 0)),
            load_by_io_tiles=bool(stored.get("useIOTilesToLoad", 0)),
            store_by_io_tiles=bool(stored.get("useIOTilesToStore", 0)),
            min_off_chip=stored.get("minElementsForOffChip"),
            min_sharded=stored.get("minElementsForReplicatedTensorSharding"),
        )

    return Locations(
        location("activation"),
        location("weight"),
        location("optimizer"),
        location("accumulator"),
        values.get("numIOTiles"),
    )
