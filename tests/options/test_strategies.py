"""Stages, phases and strategies as users build them (spec/parallel.md sections 2 and 3)."""

import pytest

import poptorch
from poptorch._ir.spec import NamedStage, Strategy
from poptorch.enums import AutoStage, Liveness
from poptorch.options import Options, Phase, PipelinedExecution, ShardedExecution, Stage
from poptorch.options.freeze import freeze

ParallelPhasedExecution = poptorch.ParallelPhasedExecution
SerialPhasedExecution = poptorch.SerialPhasedExecution


def placed(strategy):
    return freeze(Options().setExecutionStrategy(strategy), training=True).placement


REFUSED = {
    "Block IDs are supposed to be strings": [lambda: Stage(0)],
    "must either be block IDs": [
        lambda given=given: Phase(*given)
        for given in ((), (0,), ("A", Stage("B")), (["A"],), (None,))
    ],
    "associated with more than one stage": [
        lambda cls=cls: cls(Stage("a", "b"), Stage("b"))
        for cls in (PipelinedExecution, ShardedExecution, SerialPhasedExecution)
    ],
    "There is currently no AutoStage": [SerialPhasedExecution, ParallelPhasedExecution],
    "Unknown block": [lambda: ShardedExecution("a").stage("x")],
    ".": [
        *(lambda given=given: PipelinedExecution(*given) for given in (
            (0,), (AutoStage.SameAsIpu, "a"), (Phase("a"),), ([],), ([Stage("a")],), (None,))),
        lambda: Stage("a").ipu("3"),
        *(lambda n=n: SerialPhasedExecution("A", "B").phase(n) for n in (-1, 2, "0", 1.0)),
        lambda: SerialPhasedExecution("A").useSeparateBackwardPhase(1),
        lambda: SerialPhasedExecution("A").setTensorsLiveness(1),
        lambda: ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd("yes"),
        lambda: SerialPhasedExecution("A").phase(0).ipus(0, 2),
    ],
}  # fmt: skip


@pytest.mark.spec("parallel", 14, 25)
@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused(title):
    for call in REFUSED[title]:
        with pytest.raises(AssertionError, match=title):
            call()


@pytest.mark.spec("parallel", 26, 27)
def test_phases_of_blocks_and_of_stages_in_every_way_to_pass_them():
    assert (len(Phase("A", "B").stages), Phase("A", "B").stage(0).blocks) == (1, ("A", "B"))
    parallel = Phase(Stage("A"), Stage("B"))
    assert len(parallel.stages) == 2
    SerialPhasedExecution(parallel, Phase("C", "D")).phase(0).ipus(0, 2)
    with pytest.raises(AssertionError):
        parallel.ipus(1, "1")
    assert repr(parallel) == "Phase(Stage('A').ipu(0), Stage('B').ipu(2))"
    expected = placed(SerialPhasedExecution(Phase("A"), Phase("B")))
    for arguments in (
        ("A", "B"), (Stage("A"), Stage("B")), (["A"], ["B"]), ([Stage("A")], [Stage("B")]),
        ([Phase("A"), Phase("B")],), ([["A"], ["B"]],), ((Phase("A"), "B"),),
    ):  # fmt: skip
        assert placed(SerialPhasedExecution(*arguments)) == expected
    one = SerialPhasedExecution(["A", "B"])
    assert [stage.blocks for stage in one.phase(0).stages] == [("A", "B")]
    assert len(one._phases) == 1
    assert SerialPhasedExecution("A", "B").phase(1).stage(0).blocks == ("B",)


@pytest.mark.parametrize("cls", [PipelinedExecution, ShardedExecution])
def test_stages_by_position(cls):
    strategy = cls(Stage("a").ipu(5), "b", ["c", "d"], ("e",))
    assert placed(strategy).stages == (
        NamedStage(("a",), 0, ipu=5), NamedStage(("b",), 1), NamedStage(("c", "d"), 2),
        NamedStage(("e",), 3),
    )  # fmt: skip
    assert strategy.stage("d").blocks == ("c", "d")
    assert cls(Stage("a", "a")).stage("a").blocks == ("a", "a")
    stage = Stage("a")
    assert stage.ipu(3) is stage


@pytest.mark.spec("parallel", 20)
def test_automatic_stages_and_interleaving() -> None:
    assert issubclass(ShardedExecution, PipelinedExecution)
    assert placed(ShardedExecution("a")).strategy is Strategy.SHARDED
    assert placed(PipelinedExecution()).auto_stage is AutoStage.SameAsIpu
    assert placed(PipelinedExecution(AutoStage.AutoIncrement)).auto_stage is AutoStage.AutoIncrement
    named = placed(PipelinedExecution("a"))
    assert named.auto_stage is None
    assert not named.interleaved
    assert placed(PipelinedExecution("a").useInterleavedSchedule()).interleaved
    assert not placed(ShardedExecution("a").useInterleavedSchedule()).interleaved


def test_phased_settings():
    serial = SerialPhasedExecution("A", "B")
    assert serial.useSeparateBackwardPhase() is serial
    assert serial.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is serial
    assert serial._backend_options() == {
        "execution_mode": 2, "separate_backward_phase": True, "tensors_liveness": 3,
        "serial_phases_execution": True,
    }  # fmt: skip
    parallel = ParallelPhasedExecution("A", "B").sendTensorsOffChipAfterFwd()
    assert placed(parallel).liveness is Liveness.OffChipAfterFwd
    parallel.sendTensorsOffChipAfterFwd(False)
    assert parallel._backend_options()["tensors_liveness"] == 0
    assert parallel._backend_options()["serial_phases_execution"] is False
    assert repr(serial) == (
        "SerialPhasedExecution(Phase(Stage('A')), Phase(Stage('B')))"
        ".useSeparateBackwardPhase().setTensorsLiveness(Liveness.OffChipAfterEachPhase)"
    )
