"""Stages, phases and strategies as users build them (spec/parallel.md sections 2 and 3)."""

import copy
import pickle

import pytest

from poptorch._ir.spec import NamedStage, Strategy
from poptorch.enums import AutoStage, Liveness, OutputMode
from poptorch.options import (
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from poptorch.options.freeze import freeze


def placed(strategy):
    return freeze(Options().setExecutionStrategy(strategy), training=True).placement


@pytest.mark.spec("parallel", 14)
def test_block_ids_are_strings():
    with pytest.raises(AssertionError, match="Block IDs are supposed to be strings"):
        Stage(0)
    assert Stage("a", "b").blocks == ("a", "b")


def test_a_stage_takes_a_device():
    stage = Stage("a")
    assert stage.ipu(3) is stage
    with pytest.raises(AssertionError):
        stage.ipu("3")
    assert repr(stage) == "Stage('a').ipu(3)"


@pytest.mark.spec("parallel", 26)
def test_phases_of_blocks_and_of_stages():
    assert len(Phase("A", "B").stages) == 1
    assert Phase("A", "B").stage(0).blocks == ("A", "B")
    parallel = Phase(Stage("A"), Stage("B"))
    assert len(parallel.stages) == 2
    strategy = SerialPhasedExecution(parallel, Phase("C", "D"))
    strategy.phase(0).ipus(0, 2)
    assert repr(parallel) == "Phase(Stage('A').ipu(0), Stage('B').ipu(2))"
    with pytest.raises(AssertionError):
        strategy.phase(1).ipus(0, 2)


@pytest.mark.parametrize("arguments", [(), (0,), ("A", Stage("B")), (["A"],), (None,)])
def test_other_phases_are_refused(arguments):
    with pytest.raises(AssertionError, match="must either be block IDs"):
        Phase(*arguments)


def test_ipus_of_a_refused_phase_stay_as_they_were():
    phase = Phase(Stage("A"), Stage("B"))
    with pytest.raises(AssertionError):
        phase.ipus(0, "1")
    assert repr(phase) == "Phase(Stage('A'), Stage('B'))"


@pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution])
def test_stages_by_position(cls):
    strategy = cls(Stage("a").ipu(5), "b", ["c", "d"], ("e",))
    assert placed(strategy).stages == (
        NamedStage(("a",), 0, ipu=5),
        NamedStage(("b",), 1),
        NamedStage(("c", "d"), 2),
        NamedStage(("e",), 3),
    )
    assert strategy.stage("d").blocks == ("c", "d")
    with pytest.raises(AssertionError, match="Unknown block"):
        strategy.stage("x")


def test_automatic_stages():
    assert placed(PipelinedExecution()).auto_stage is AutoStage.SameAsIpu
    increment = PipelinedExecution(AutoStage.AutoIncrement)
    assert placed(increment).auto_stage is AutoStage.AutoIncrement
    assert placed(PipelinedExecution("a")).auto_stage is None


@pytest.mark.parametrize(
    "arguments", [(0,), (AutoStage.SameAsIpu, "a"), (Phase("a"),), ([],), ([Stage("a")],), (None,)]
)
def test_other_stages_are_refused(arguments):
    with pytest.raises(AssertionError):
        PipelinedExecution(*arguments)


@pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution, SerialPhasedExecution])
def test_a_block_belongs_to_one_stage(cls):
    with pytest.raises(AssertionError, match="associated with more than one stage"):
        cls(Stage("a", "b"), Stage("b"))
    assert cls(Stage("a", "a")).stage("a").blocks == ("a", "a")


@pytest.mark.spec("parallel", 20)
def test_sharded_is_a_subclass_of_pipelined():
    sharded = ShardedExecution("a")
    assert isinstance(sharded, PipelinedExecution)
    assert placed(sharded).strategy is Strategy.SHARDED
    assert sharded._backend_options() == {"execution_mode": 1}
    assert PipelinedExecution()._backend_options() == {"execution_mode": 0}


@pytest.mark.spec("parallel", 25)
@pytest.mark.parametrize("cls", [SerialPhasedExecution, ParallelPhasedExecution])
def test_phased_strategies_need_phases(cls):
    with pytest.raises(AssertionError, match="There is currently no AutoStage"):
        cls()


@pytest.mark.spec("parallel", 27)
def test_every_way_to_pass_phases():
    expected = placed(SerialPhasedExecution(Phase("A"), Phase("B")))
    for arguments in (
        ("A", "B"),
        (Stage("A"), Stage("B")),
        (["A"], ["B"]),
        ([Stage("A")], [Stage("B")]),
        ([Phase("A"), Phase("B")],),
        ([["A"], ["B"]],),
        ((Phase("A"), "B"),),
    ):
        assert placed(SerialPhasedExecution(*arguments)) == expected
    one = SerialPhasedExecution(["A", "B"])
    assert [stage.blocks for stage in one.phase(0).stages] == [("A", "B")]
    assert len(one._phases) == 1


def test_phase_numbers_are_checked():
    strategy = SerialPhasedExecution("A", "B")
    assert strategy.phase(1).stage(0).blocks == ("B",)
    for number in (-1, 2, "0", 1.0):
        with pytest.raises(AssertionError):
            strategy.phase(number)


def test_phased_settings():
    serial = SerialPhasedExecution("A", "B")
    assert serial.useSeparateBackwardPhase() is serial
    assert serial.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is serial
    assert serial._backend_options() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 3,
        "serial_phases_execution": True,
    }
    parallel = ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd()
    assert placed(parallel).liveness is Liveness.OffChipAfterFwd
    parallel.sendTensorsOffChipAfterFwd(False)
    assert parallel._backend_options()["tensors_liveness"] == 0
    assert parallel._backend_options()["serial_phases_execution"] is False
    for call in (
        lambda: serial.useSeparateBackwardPhase(1),
        lambda: serial.setTensorsLiveness(1),
        lambda: parallel.sendTensorsOffChipAfterFwd("yes"),
    ):
        with pytest.raises(AssertionError):
            call()
    assert repr(serial) == (
        "SerialPhasedExecution(Phase(Stage('A')), Phase(Stage('B')))"
        ".useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterEachPhase)"
    )


@pytest.mark.parametrize(
    "liveness, separate, total",
    [
        (Liveness.AlwaysLive, False, 3),
        (Liveness.AlwaysLive, True, 4),
        (Liveness.OffChipAfterFwd, False, 6),
        (Liveness.OffChipAfterFwd, True, 6),
        (Liveness.OffChipAfterFwdNoOverlap, False, 8),
        (Liveness.OffChipAfterEachPhase, True, 12),
    ],
)
def test_internal_phases(liveness, separate, total):
    strategy = SerialPhasedExecution("A", "B", "C").setTensorsLiveness(liveness)
    strategy.useSeparateBackwardPhase(separate)
    assert placed(strategy).total_phases == total


def test_parallel_phases_alternate_between_even_and_odd_devices():
    strategy = ParallelPhasedExecution(Phase(Stage("0"), Stage("1")), Phase(Stage("2"), Stage("3")))
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    placement = placed(strategy)
    assert placement.phased
    assert placement.find("3") == NamedStage(("3",), 1, 1, 3)
    assert placement.find("x") is None
    serial = SerialPhasedExecution("A", "B")
    serial.phase(1).ipus(0)
    assert placed(serial).find("B").ipu == 0


def test_strategies_copy_and_pickle():
    strategy = SerialPhasedExecution(Phase(Stage("A").ipu(1)), "B").useSeparateBackwardPhase()
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert repr(other) == repr(strategy)
        assert other.stage("A") is other.phase(0).stage(0)
        other.stage("A").ipu(7)
        assert strategy.stage("A")._ipu == 1


def test_blocks_are_logged_at_construction(caplog):
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        PipelinedExecution("a", "b")
    assert [record.message for record in caplog.records] == [
        "block a added to stage 0",
        "block b added to stage 1",
    ]


def test_phased_options_in_the_dictionary():
    options = Options().setExecutionStrategy(SerialPhasedExecution("A"))
    assert options.outputMode(OutputMode.All).toDict()["serial_phases_execution"] is True
