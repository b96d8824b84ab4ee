"""Execution strategies: stages, phases, and how they are passed."""

from collections.abc import Callable
from typing import Any

import pytest

from poptorch import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch._ir.spec import NamedStage, Placement, Strategy
from poptorch.enums import AutoStage, Liveness
from poptorch.options import Options
from poptorch.options.freeze_options import freeze

Pipelined = type[PipelinedExecution]


def placed(strategy: Any) -> Placement:
    """The placement in the Spec of options with this strategy."""
    return freeze(Options().setExecutionStrategy(strategy), training=True).placement


# What is refused.


@pytest.mark.spec("parallel", 14)
def test_a_block_id_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(AssertionError, match="Block IDs are supposed to be strings"):
        Stage(0)


@pytest.mark.parametrize("arguments", [(), (0,), ("A", Stage("B")), (["A"],), (None,)], ids=repr)
def test_a_phase_of_anything_but_block_ids_or_stages_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="must either be block IDs"):
        Phase(*arguments)


@pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution, SerialPhasedExecution])
def test_a_block_in_two_stages_is_refused(cls: type) -> None:
    with pytest.raises(AssertionError, match="associated with more than one stage"):
        cls(Stage("a", "b"), Stage("b"))


@pytest.mark.spec("parallel", 25)
@pytest.mark.parametrize("cls", [SerialPhasedExecution, ParallelPhasedExecution])
def test_a_phased_strategy_without_phases_is_refused(cls: type) -> None:
    with pytest.raises(AssertionError, match="There is currently no AutoStage"):
        cls()


def test_a_block_that_no_stage_has_is_refused() -> None:
    with pytest.raises(AssertionError, match="Unknown block"):
        ShardedExecution("a").stage("x")


@pytest.mark.parametrize(
    "arguments",
    [(0,), (AutoStage.SameAsIpu, "a"), (Phase("a"),), ([],), ([Stage("a")],), (None,)],
    ids=repr,
)
def test_a_pipeline_of_anything_but_stages_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        PipelinedExecution(*arguments)


@pytest.mark.parametrize("number", [-1, 2, "0", 1.0], ids=repr)
def test_a_phase_of_another_number_is_refused(number: Any) -> None:
    with pytest.raises(AssertionError):
        SerialPhasedExecution("A", "B").phase(number)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: Stage("a").ipu("3"), id="a device that is a text"),
        pytest.param(
            lambda: SerialPhasedExecution("A").useSeparateBackwardPhase(1),
            id="a backward phase of 1",
        ),
        pytest.param(
            lambda: SerialPhasedExecution("A").setTensorsLiveness(1), id="a liveness of 1"
        ),
        pytest.param(
            lambda: ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd("yes"),
            id="tensors off the chip: yes",
        ),
        pytest.param(
            lambda: SerialPhasedExecution("A").phase(0).ipus(0, 2),
            id="two devices for one stage",
        ),
        pytest.param(
            lambda: Phase(Stage("A"), Stage("B")).ipus(1, "1"), id="devices that are texts"
        ),
    ],
)
def test_a_setting_of_another_type_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        call()


# Phases.


@pytest.mark.spec("parallel", 26)
def test_two_blocks_in_a_phase_are_one_stage() -> None:
    phase = Phase("A", "B")

    assert [stage.blocks for stage in phase.stages] == [("A", "B")]


@pytest.mark.spec("parallel", 26)
def test_two_stages_in_a_phase_are_two() -> None:
    phase = Phase(Stage("A"), Stage("B"))

    assert [stage.blocks for stage in phase.stages] == [("A",), ("B",)]


def test_devices_of_a_phase_are_those_of_its_stages() -> None:
    phase = Phase(Stage("A"), Stage("B"))

    SerialPhasedExecution(phase, Phase("C", "D")).phase(0).ipus(0, 2)

    assert repr(phase) == "Phase(Stage('A').ipu(0), Stage('B').ipu(2))"


@pytest.mark.spec("parallel", 27)
@pytest.mark.parametrize(
    "arguments",
    [
        ("A", "B"),
        (Stage("A"), Stage("B")),
        (["A"], ["B"]),
        ([Stage("A")], [Stage("B")]),
        ([Phase("A"), Phase("B")],),
        ([["A"], ["B"]],),
        ((Phase("A"), "B"),),
    ],
    ids=repr,
)
def test_phases_can_be_passed_in_many_ways(arguments: tuple[Any, ...]) -> None:
    expected = placed(SerialPhasedExecution(Phase("A"), Phase("B")))

    assert placed(SerialPhasedExecution(*arguments)) == expected


def test_a_list_of_blocks_is_one_phase_of_one_stage() -> None:
    strategy = SerialPhasedExecution(["A", "B"])

    (phase,) = strategy._phases
    assert [stage.blocks for stage in phase.stages] == [("A", "B")]


def test_a_phase_is_found_by_its_number() -> None:
    assert SerialPhasedExecution("A", "B").phase(1).stage(0).blocks == ("B",)


def test_settings_of_a_serial_phased_execution_chain() -> None:
    strategy = SerialPhasedExecution("A", "B")

    assert strategy.useSeparateBackwardPhase() is strategy
    assert strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is strategy


def test_settings_of_a_serial_phased_execution_are_known_to_the_backend() -> None:
    strategy = SerialPhasedExecution("A", "B").useSeparateBackwardPhase()
    strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase)

    assert strategy._backend_options() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "serial_phases_execution": True,
        "tensors_liveness": 3,
    }


def test_the_text_of_a_phased_execution_is_the_code_that_makes_it() -> None:
    strategy = SerialPhasedExecution("A", "B").useSeparateBackwardPhase()
    strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase)

    assert repr(strategy) == (
        "SerialPhasedExecution(Phase(Stage('A')), Phase(Stage('B')))"
        ".useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterEachPhase)"
    )


def test_tensors_of_a_parallel_phased_execution_can_be_sent_off_the_chip() -> None:
    strategy = ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd()

    assert placed(strategy).liveness is Liveness.OffChipAfterFwd


def test_tensors_of_a_parallel_phased_execution_can_stay_on_the_chip_again() -> None:
    strategy = ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd()

    strategy.sendTensorsOffChipAfterFwd(False)

    assert strategy._backend_options()["tensors_liveness"] == 0
    assert strategy._backend_options()["serial_phases_execution"] is False


# Stages.

pipelined_or_sharded = pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution])


@pipelined_or_sharded
def test_stages_have_the_order_in_which_they_are_given(cls: Pipelined) -> None:
    strategy = cls(Stage("a").ipu(5), "b", ["c", "d"], ("e",))

    assert placed(strategy).stages == (
        NamedStage(("a",), 0, ipu=5),
        NamedStage(("b",), 1),
        NamedStage(("c", "d"), 2),
        NamedStage(("e",), 3),
    )


@pipelined_or_sharded
def test_a_stage_is_found_by_any_of_its_blocks(cls: Pipelined) -> None:
    strategy = cls("a", ["c", "d"])

    assert strategy.stage("d").blocks == ("c", "d")


@pipelined_or_sharded
def test_a_stage_may_have_a_block_twice(cls: Pipelined) -> None:
    assert cls(Stage("a", "a")).stage("a").blocks == ("a", "a")


def test_setting_the_device_of_a_stage_returns_the_stage() -> None:
    stage = Stage("a")

    assert stage.ipu(3) is stage


@pytest.mark.spec("parallel", 20)
def test_a_sharded_execution_is_a_pipelined_one() -> None:
    assert issubclass(ShardedExecution, PipelinedExecution)
    assert placed(ShardedExecution("a")).strategy is Strategy.SHARDED


@pytest.mark.parametrize(
    "strategy, expected",
    [
        (PipelinedExecution(), AutoStage.SameAsIpu),
        (PipelinedExecution(AutoStage.AutoIncrement), AutoStage.AutoIncrement),
        (PipelinedExecution("a"), None),
    ],
    ids=repr,
)
def test_stages_are_automatic_unless_they_are_named(
    strategy: PipelinedExecution, expected: AutoStage | None
) -> None:
    assert placed(strategy).auto_stage is expected


@pytest.mark.parametrize(
    "strategy, interleaved",
    [
        (PipelinedExecution("a"), False),
        (PipelinedExecution("a").useInterleavedSchedule(), True),
        (ShardedExecution("a").useInterleavedSchedule(), False),
    ],
    ids=repr,
)
def test_only_a_pipeline_can_be_interleaved(
    strategy: PipelinedExecution, interleaved: bool
) -> None:
    assert placed(strategy).interleaved is interleaved
