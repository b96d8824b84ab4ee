"""Define execution strategies, which users build from stages and phases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from .._base import log
from .._base.errors import AssertionFailure
from .._ir.spec import NamedStage, Placement, Strategy
from ..enums import AutoStage, Liveness
from .option_table import expect

_WHAT = "stages and phases must either be block IDs (strings) or Stages"


class Stage:
    """Blocks that run together on one device.

    Args:
        block_ids: ids of the blocks.

    Raises:
        AssertionFailure: an id is not a ``str`` (an ``AssertionError``).
    """

    def __init__(self, *block_ids: str) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise AssertionFailure(
                "Block IDs are supposed to be strings",
                got=", ".join(map(repr, block_ids)),
                fix='for example poptorch.Stage("b0", "b1")',
            )
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Self:
        """Fix the device, by its index among the model's devices; it has precedence over the
        ``ipu_id`` of blocks.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        expect("ipu", ipu, int)
        self._ipu = ipu
        return self

    def __repr__(self) -> str:
        device = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){device}"


class Phase:
    """Stages that run side by side, one phase after another.

    Args:
        arg: ``Stage`` objects, the parallel stages of the phase, or a list of them; or block ids,
            which make up one stage.

    Raises:
        AssertionFailure: anything else (an ``AssertionError``).
    """

    def __init__(self, *arg: Stage | str | list[Stage]) -> None:
        if len(arg) == 1 and isinstance(arg[0], list) and isinstance((*arg[0], None)[0], Stage):
            arg = tuple(arg[0])
        self._stages = _stages_of(arg)  # type: ignore[arg-type]

    @property
    def stages(self) -> list[Stage]:
        """The parallel stages."""
        return self._stages

    def stage(self, idx: int) -> Stage:
        """Return one of the parallel stages."""
        return self._stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Assign devices to the stages, in order.

        Raises:
            AssertionFailure: not one device per stage, or not ints (an ``AssertionError``).
        """
        if len(ipus) != len(self._stages):
            raise AssertionFailure(
                "A phase needs one IPU per stage",
                got=f"{len(ipus)} IPUs for {len(self._stages)} stages",
                fix=f"pass {len(self._stages)} device ids",
            )
        for ipu in ipus:
            expect("ipu", ipu, int)
        for stage, ipu in zip(self._stages, ipus, strict=True):
            stage.ipu(ipu)

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self._stages))})"


class _IExecutionStrategy:
    """The base of all strategies: stages, which are found by the ids of their blocks."""

    _kind: Strategy

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._all_stages = list(stages)
        self._stage_numbers: dict[str, int] = {}
        for number, stage in enumerate(self._all_stages):
            for block in stage.blocks:
                if self._stage_numbers.setdefault(block, number) != number:
                    raise AssertionFailure(
                        f"Block {block!r} is associated with more than one stage",
                        got=f"stages {self._stage_numbers[block]} and {number}",
                        fix="list every block in only one stage",
                    )
                log.python.debug("block %s added to stage %d", block, number)

    def stage(self, block_id: str) -> Stage:
        """Return the stage that names a block.

        Raises:
            AssertionFailure: no stage names it (an ``AssertionError``).
        """
        if block_id not in self._stage_numbers:
            known = ", ".join(map(repr, self._stage_numbers)) or "none"
            raise AssertionFailure(
                f"Unknown block {block_id!r}",
                got=f"known blocks: {known}",
                fix="use the id of a block that is part of the strategy",
            )
        return self._all_stages[self._stage_numbers[block_id]]

    def _backend_options(self) -> dict[str, Any]:
        return {"execution_mode": int(self._kind is Strategy.SHARDED)}


class PipelinedExecution(_IExecutionStrategy):
    """Stages work on different micro-batches at the same time.

    Args:
        args: nothing (``AutoStage.SameAsIpu``); one ``AutoStage``; or one item per stage, each a
            ``Stage``, a block id, or a list or tuple of block ids.

    Raises:
        AssertionFailure: any other argument, or a block in two stages (an ``AssertionError``).
    """

    _kind = Strategy.PIPELINED
    _first_release = False  # True if a wrapper is called with the 1.0 interface

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        auto = [item for item in args or (AutoStage.SameAsIpu,) if isinstance(item, AutoStage)]
        if auto and len(args) > 1:
            raise AssertionFailure(
                "An AutoStage must be the only argument of an execution strategy",
                got=", ".join(map(repr, args)),
                fix=(
                    "pass only the AutoStage, which creates the stages itself; or pass only stages"
                ),
            )
        self._auto_stage = auto[0] if auto else None
        self._interleaved = False
        super().__init__(_stage_of(item) for item in args if not isinstance(item, AutoStage))

    def useInterleavedSchedule(self, use: bool = True) -> Self:
        """Run backward passes as early as possible, so that fewer activations are stored (1F1B).

        By default, a chip first does all forward passes of a cycle, then all backward passes.
        Results are the same. The option has no effect on sharded execution. Not a PopTorch option.
        """
        expect("use", use, bool)
        self._interleaved = use
        return self

    def _frozen(self) -> Placement:
        return Placement(
            strategy=self._kind,
            auto_stage=self._auto_stage,
            stages=tuple(
                NamedStage(stage.blocks, number, ipu=stage._ipu)
                for number, stage in enumerate(self._all_stages)
            ),
            interleaved=self._interleaved and self._kind is Strategy.PIPELINED,
            first_release=self._first_release,
        )

    def __repr__(self) -> str:
        text = ", ".join(map(repr, self._all_stages))
        if self._auto_stage is not None:
            text = f"AutoStage.{self._auto_stage.name}"
        end = ".useInterleavedSchedule()" if self._interleaved else ""
        return f"{type(self).__name__}({text}){end}"


class ShardedExecution(PipelinedExecution):
    """Stages run one after another for each micro-batch; same arguments as PipelinedExecution."""

    _kind = Strategy.SHARDED


class _IPhasedExecution(_IExecutionStrategy):
    """Phases run one after another, with tensors moved between chip and streaming memory.

    Args:
        phases: one argument per phase: a ``Phase``, a list of ``Stage`` objects, a list of block
            ids (one stage), a ``Stage`` or a block id; or one list of phases.

    Raises:
        AssertionFailure: no phases, any other argument, or a block in two stages
            (an ``AssertionError``).
    """

    def __init__(self, *phases: Phase | Stage | str | Sequence[Any]) -> None:
        if not phases:
            raise AssertionFailure(
                "There is currently no AutoStage for PhasedExecution",
                fix="list the phases: SerialPhasedExecution(Phase('A'), Phase('B'))",
            )
        inside: Any = phases[0] if len(phases) == 1 else None  # the documentation passes a list
        listed = isinstance(inside, (list, tuple))
        if listed and any(isinstance(item, (Phase, list, tuple)) for item in inside):
            phases = tuple(inside)
        self._phases = [_phase_of(item) for item in phases]
        self._separate_backward_phase = False
        self._tensors_liveness = Liveness.AlwaysLive
        super().__init__(stage for phase in self._phases for stage in phase.stages)
        sizes = [len(phase.stages) for phase in self._phases]
        if len(set(sizes)) > 1:
            log.python.warning(
                (
                    "The phases have %s stages. Each phase should have as many stages as a group "
                    "has IPUs; otherwise some IPUs are idle"
                ),
                ", ".join(map(str, sizes)),
            )

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
                fix=f"pass the index of one of the {len(self._phases)} phases of the strategy",
            )
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Use different phases for forward and backward; by default they share the last phase."""
        expect("use", use, bool)
        self._separate_backward_phase = use
        return self

    def _backend_options(self) -> dict[str, Any]:
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": int(self._tensors_liveness),
            "serial_phases_execution": self._kind is Strategy.SERIAL_PHASED,
        }

    def _frozen(self) -> Placement:
        return Placement(
            strategy=self._kind,
            auto_stage=None,
            stages=tuple(
                NamedStage(stage.blocks, number, phase_number, stage._ipu)
                for phase_number, phase in enumerate(self._phases)
                for number, stage in enumerate(phase.stages)
            ),
            separate_backward_phase=self._separate_backward_phase,
            liveness=self._tensors_liveness,
        )

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({', '.join(map(repr, self._phases))})"
        if self._separate_backward_phase:
            text += ".useSeparateBackwardPhase()"
        if self._tensors_liveness == Liveness.AlwaysLive:
            return text
        if self._kind is Strategy.PARALLEL_PHASED:
            return f"{text}.sendTensorsOffChipAfterFwd()"
        return f"{text}.setTensorsLiveness(Liveness.{self._tensors_liveness.name})"


class SerialPhasedExecution(_IPhasedExecution):
    """All phases run on one group of devices, one after another."""

    _kind = Strategy.SERIAL_PHASED

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Choose when tensors leave the chip (default ``Liveness.AlwaysLive``)."""
        expect("liveness", liveness, Liveness)
        self._tensors_liveness = liveness
        return self


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between two groups of devices: even phases on even ids, odd on odd."""

    _kind = Strategy.PARALLEL_PHASED

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Send tensors off chip after the forward pass, or keep them (the default)."""
        expect("off_chip", off_chip, bool)
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self


def _phase_of(item: Any) -> Phase:
    if isinstance(item, Phase):
        return item
    return Phase(*item) if isinstance(item, (list, tuple)) else Phase(item)


def _stage_of(item: Stage | str | Sequence[str]) -> Stage:
    if isinstance(item, Stage):
        return item
    blocks = item if isinstance(item, (list, tuple)) else [item]
    if blocks and all(isinstance(block, str) for block in blocks):
        return Stage(*blocks)
    raise AssertionFailure(
        f"Invalid stage: {_WHAT}",
        got=repr(item),
        fix='pass ids of blocks such as "b0", lists of ids, or poptorch.Stage("b0", "b1")',
    )


def _stages_of(items: Sequence[Stage | str]) -> list[Stage]:
    if items and all(isinstance(item, Stage) for item in items):
        return list(items)  # type: ignore[arg-type]
    if items and all(isinstance(item, str) for item in items):
        return [Stage(*items)]  # type: ignore[arg-type]
    raise AssertionFailure(
        f"Invalid phase: {_WHAT}",
        got=", ".join(map(repr, items)) or "no arguments",
        fix='pass ids of blocks such as "b0", or stages: poptorch.Stage("b0", "b1")',
    )
