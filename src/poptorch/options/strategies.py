"""The four execution strategies, as users build them.

A setter's argument of another type than its signature says is an ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from .._base import log
from .._base.errors import AssertionFailure
from ..enums import AutoStage, Liveness
from .check import expect
from .stages import Phase, Stage, stage_of


class _IExecutionStrategy:
    """What every strategy has: stages, found by the ids of their blocks."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._all_stages = list(stages)
        self._stage_numbers: dict[str, int] = {}
        for number, stage in enumerate(self._all_stages):
            for block in stage.blocks:
                if self._stage_numbers.setdefault(block, number) != number:
                    raise AssertionFailure(
                        f"Block {block!r} is associated with more than one stage",
                        got=f"stages {self._stage_numbers[block]} and {number}",
                        fix="name every block in one stage only",
                    )
                log.python.debug("block %s added to stage %d", block, number)

    def stage(self, block_id: str) -> Stage:
        """Return the stage that names a block.

        Raises:
            AssertionFailure: no stage names it (an ``AssertionError``).
        """
        if block_id not in self._stage_numbers:
            known = ", ".join(map(repr, self._stage_numbers)) or "none"
            raise AssertionFailure(f"Unknown block {block_id!r}", got=f"known blocks: {known}")
        return self._all_stages[self._stage_numbers[block_id]]

    def _backend_options(self) -> dict[str, Any]:
        raise NotImplementedError


class PipelinedExecution(_IExecutionStrategy):
    """Stages work on different micro-batches at the same time.

    Args:
        args: nothing (``AutoStage.SameAsIpu``); one ``AutoStage``; or one item per stage, each a
            ``Stage``, a block id, or a list or tuple of block ids.

    Raises:
        AssertionFailure: any other argument, or a block in two stages (an ``AssertionError``).
    """

    _execution_mode = 0
    _first_release = False  # set where a wrapper is called with the 1.0 interface

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        auto = [item for item in args if isinstance(item, AutoStage)]
        if auto and len(args) > 1:
            raise AssertionFailure(
                "An AutoStage must be the only argument of a strategy",
                got=", ".join(map(repr, args)),
            )
        self._auto_stage: AutoStage | None = (
            auto[0] if auto else None if args else AutoStage.SameAsIpu
        )
        self._interleaved = False
        explicit = [item for item in args if not isinstance(item, AutoStage)]
        super().__init__(stage_of(item) for item in explicit)

    def useInterleavedSchedule(self, use: bool = True) -> Self:
        """Let backward parts run as early as they can, so that fewer activations wait.

        By default a chip does its forward parts of a cycle, then its backward parts. Results are
        the same. Not a PopTorch option; no effect on sharded execution.
        """
        expect("use", use, bool)
        self._interleaved = use
        return self

    def _backend_options(self) -> dict[str, Any]:
        return {"execution_mode": self._execution_mode}

    def __repr__(self) -> str:
        text = ", ".join(map(repr, self._all_stages))
        if self._auto_stage is not None:
            text = f"AutoStage.{self._auto_stage.name}"
        end = ".useInterleavedSchedule()" if self._interleaved else ""
        return f"{type(self).__name__}({text}){end}"


class ShardedExecution(PipelinedExecution):
    """Stages run one after another for each micro-batch; same arguments as PipelinedExecution."""

    _execution_mode = 1


class _IPhasedExecution(_IExecutionStrategy):
    """Phases run one after another, with tensors moved between chip and streaming memory.

    Args:
        phases: one argument per phase: a ``Phase``, a list of ``Stage`` objects, a list of block
            ids (one stage), a ``Stage`` or a block id; or one list of phases.

    Raises:
        AssertionFailure: no phases, any other argument, or a block in two stages
            (an ``AssertionError``).
    """

    _serial: bool

    def __init__(self, *phases: Phase | Stage | str | Sequence[Any]) -> None:
        if not phases:
            raise AssertionFailure(
                "There is currently no AutoStage for PhasedExecution",
                fix="name the phases: SerialPhasedExecution(Phase('A'), Phase('B'))",
            )
        self._phases = [_phase_of(item) for item in _unwrapped(phases)]
        self._separate_backward_phase = False
        self._tensors_liveness = Liveness.AlwaysLive
        super().__init__(stage for phase in self._phases for stage in phase.stages)

    def phase(self, phase: int) -> Phase:
        """Return the i-th phase.

        Raises:
            AssertionFailure: not a non-negative int below the number of phases
                (an ``AssertionError``).
        """
        if not isinstance(phase, int) or not 0 <= phase < len(self._phases):
            raise AssertionFailure(
                f"A phase number must be an int from 0 to {len(self._phases) - 1}",
                got=repr(phase),
            )
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Let forward and backward share no phase; by default they share the last one."""
        expect("use", use, bool)
        self._separate_backward_phase = use
        return self

    def _backend_options(self) -> dict[str, Any]:
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": int(self._tensors_liveness),
            "serial_phases_execution": self._serial,
        }

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({', '.join(map(repr, self._phases))})"
        if self._separate_backward_phase:
            text += ".useSeparateBackwardPhase()"
        return text + self._liveness_text()

    def _liveness_text(self) -> str:
        raise NotImplementedError


class SerialPhasedExecution(_IPhasedExecution):
    """All phases run on one group of devices, one after another."""

    _serial = True

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Choose when tensors leave the chip (default ``Liveness.AlwaysLive``)."""
        expect("liveness", liveness, Liveness)
        self._tensors_liveness = liveness
        return self

    def _liveness_text(self) -> str:
        if self._tensors_liveness == Liveness.AlwaysLive:
            return ""
        return f".setTensorsLiveness(Liveness.{self._tensors_liveness.name})"


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between two groups of devices: even phases on even ids, odd on odd."""

    _serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Send tensors off chip after the forward pass, or keep them (the default)."""
        expect("off_chip", off_chip, bool)
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def _liveness_text(self) -> str:
        live = self._tensors_liveness == Liveness.AlwaysLive
        return "" if live else ".sendTensorsOffChipAfterFwd()"


def _unwrapped(phases: Sequence[Any]) -> Sequence[Any]:
    """Return the phases of the documented spelling that wraps all of them in one list."""
    if len(phases) == 1 and isinstance(phases[0], (list, tuple)):
        inside = phases[0]
        if any(isinstance(item, (Phase, list, tuple)) for item in inside):
            return inside
    return phases


def _phase_of(item: Any) -> Phase:
    if isinstance(item, Phase):
        return item
    if isinstance(item, (list, tuple)):
        return Phase(*item)
    return Phase(item)
