"""The container protocol, ``poptorch.Attribute``, spellings of earlier releases."""

import pytest
import torch

import poptorch
from poptorch import Error
from poptorch.autocasting import Policy
from poptorch.enums import AnchorMode, OutputMode, ReductionType
from poptorch.options import Attribute, Options, ShardedExecution, overview
from poptorch.options.attribute import current
from poptorch.options.container import Container
from poptorch.options.freeze import prepare
from poptorch.options.legacy_call import read_call


@pytest.fixture
def group() -> Container:
    return Container(count=1, name="x", on=True)


@pytest.mark.spec("options", 4)
def test_declared_values_are_attributes_that_keep_their_type(group: Container) -> None:
    assert (group.count, group.name, group("count")) == (1, "x", 1)
    assert group.exists("name")
    assert (group.exists("other"), hasattr(group, "other")) == (False, False)
    group.count = 4
    assert group.count == 4
    for change in (lambda: setattr(group, "count", "4"), lambda: group.set(on=False, name=3)):
        with pytest.raises(AssertionError, match="Unexpected type"):
            change()
    assert (group.count, group.on) == (4, True)  # none of a refused call
    with pytest.raises(AssertionError, match="Invalid option"):
        group.other = 4
    with pytest.raises(AttributeError, match="Invalid attribute"):
        group.other  # noqa: B018
    group.count = True  # an int, which does not narrow the type
    group.count = 7
    assert group.count == 7
    assert group.createOrSet(extra=1.5) is group
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.createOrSet(extra="text")
    for _ in range(2):
        group.deleteIfExists("extra")
    assert not group.exists("extra")


@pytest.mark.parametrize("use, says", [
    (lambda o: o.deviceIteration(4), r"did you mean options\.deviceIterations or"),
    (lambda o: o.gradientAccumulation(2), r"options\.Training\.gradientAccumulation\?"),
    (lambda o: setattr(o, "deviceIterations", 4), r"call it: deviceIterations\(4\)"),
    (lambda o: o.deviceIterations(0), r"deviceIterations must be at least 1"),
    (lambda o: o.Training.gradientAccumulation(-1), r"gradientAccumulation must be at least 1"),
    (lambda o: o.Distributed.stageProcesses(0), r"stageProcesses must be at least 1"),
    (lambda o: o.lanes(-1), r"lanes must be at least 0"),
    (lambda o: o.programs(0), r"programs must be at least 1"),
    (lambda o: o.maxRepeatLogs(-1), r"maxRepeatLogs must be at least 0"),
    (lambda o: o.backend("cuda"), r"use one of auto, inductor, optimise, reference, staged"),
])  # fmt: skip
def test_a_mistake_is_refused_where_it_is_made_with_what_to_write(use, says):
    options = Options()
    with pytest.raises(Error, match=says) as caught:
        use(options)
    assert "Where:  test_container.py:" in str(caught.value)
    assert repr(options) == "Options()"


@pytest.mark.spec("options", 4)
def test_attributes_of_options_and_private_names_must_exist(group: Container) -> None:
    options = Options()
    options.replication_factor = 4
    assert "replication_factor=4" in repr(options)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.replication_factor = 4.0
    assert {"replication_factor", "deviceIterations"} <= set(dir(options))
    with pytest.raises(AssertionError, match="Invalid option autoRecomputation"):
        options._Popart.autoRecomputation = 2  # a key is no attribute
    assert "autoRecomputation" not in options._Popart.options
    options._relax_optimizer_checks = True
    assert options._relax_optimizer_checks
    for each in (group, options):
        with pytest.raises(AttributeError):
            each._new = 1


def test_update_merges_in_place_and_refuses_common_keys(group: Container) -> None:
    other = {"before": 0}
    assert group.update(other) is other
    assert other == {"before": 0, "count": 1, "name": "x", "on": True}
    with pytest.raises(AssertionError):
        group.update({"count": 1})


def test_frozen_writes_are_attribute_errors(group: Container) -> None:
    group._freeze()
    for write in (
        lambda: group.set(count=2),
        lambda: group.createOrSet(extra=2),
        lambda: group.deleteIfExists("count"),
        lambda: setattr(group, "count", 2),
        lambda: setattr(group, "_values", {}),
    ):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            write()
    group._freeze(False)
    assert group.set(count=2).count == 2


def test_copies_are_of_one_piece_and_no_two_groups_are_equal(group: Container) -> None:
    duplicate = Options().clone()
    duplicate._Popart.set("x", 1)
    assert duplicate.Training._popart is duplicate._Popart
    assert group != Container(count=1, name="x", on=True)
    assert len({group, group}) == 1


def test_classes_of_users() -> None:
    """A group's class is replaced in place; a subclass assigns state before the constructor."""

    class Blocked(type(Options().Distributed)):
        def disable(self) -> None:
            raise RuntimeError("Cannot call disable")

    class Mine(Options):
        def __init__(self, per_replica: int) -> None:
            self._per_replica = per_replica
            super().__init__()

    mine = Mine(2)
    mine.Distributed.__class__ = Blocked
    with pytest.raises(RuntimeError, match="Cannot call"):
        mine.Distributed.disable()
    clone = mine.clone()
    assert (type(clone.Distributed), clone._per_replica) == (Blocked, 2)
    assert repr(mine.deviceIterations(2)) == "Mine(device_iterations=2)"


@pytest.mark.spec("ops", 25)
def test_scopes_nest_and_restore() -> None:
    outer = Attribute(__outline={"layer": "embedding", "part": "1"})
    with outer:
        with Attribute(__outline={"layer": "inner"}, other={"a": "b"}), outer:
            assert current.get() == {"__outline": {"layer": "embedding", "part": "1"},
                                     "other": {"a": "b"}}  # fmt: skip
        assert current.get() == {"__outline": {"layer": "embedding", "part": "1"}}
    assert current.get() == {}
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert current.get() == {}


@pytest.mark.parametrize("value", ["text", {"a": 1}, {1: "a"}, None])
def test_values_are_dictionaries_of_strings(value) -> None:
    with pytest.raises(AssertionError):
        Attribute(family=value)


PRECISION = {
    "runningStatisticsAlwaysFloat": True, "runningVarianceAlwaysFloat": False,
    "autocastEnabled": True, "halfFloatCasting": "anything",
    "autocastPolicy": Policy([torch.mm], [], [], []),
}  # fmt: skip
SPELLINGS = {
    "anchorMode": (lambda o: o.anchorMode(
        AnchorMode.EveryN, anchor_return_period=2).output_return_period, 2),
    "defaultAnchorMode": (lambda o: o.defaultAnchorMode(), True),
    "anchor_mode": (lambda o: o.anchor_mode, OutputMode.Default),
    "anchor_return_period": (
        lambda o: setattr(o, "anchor_return_period", 3) or o.output_return_period, 3),
    "anchorTensor(anchor_mode=)": (
        lambda o: o.anchorTensor("a", "b", anchor_mode=AnchorMode.All) or o.anchored_tensors["a"],
        ["b", False, OutputMode.All, 1]),
    "Popart": (lambda o: o.Popart is o._Popart, True),
    "_Popart.Set": (lambda o: o._Popart.Set("a", 1).options["a"], 1),
    "Popart.setPartialsType": (
        lambda o: o._Popart.setPartialsType(torch.half).options["partialsTypeMatMuls"], "half"),
    "GraphProcessing": (lambda o: o.GraphProcessing is o.Precision, True),
    "no pipelining": (
        lambda o: type(o.enablePipelining(False)._execution_strategy), ShardedExecution),
    "profile": (lambda o: "engineOptions" in o.profile(True)._Popart.options, True),
    "accumulationReductionType": (lambda o: o.Training.accumulationReductionType(
        ReductionType.Sum).accumulation_and_replication_reduction_type, ReductionType.Sum),
    "traceModel": (lambda o: o.Jit.traceModel(True) is o.Jit, True),
    **{
        n: (lambda o, n=n, v=v: getattr(o.Precision, n)(v) is o.Precision, True)
        for n, v in PRECISION.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_old_spellings_of_options(name: str, caplog) -> None:
    use, expected = SPELLINGS[name]
    assert use(Options()) == expected
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "deprecated" in warning.getMessage()


def test_old_names_of_types() -> None:
    assert AnchorMode is OutputMode
    assert poptorch.SyncPattern.PingPong is poptorch.SyncPattern.ReplicaAndLadder
    stages = [poptorch.Stage("a"), poptorch.Stage("b")]
    assert poptorch.Phase(stages).stages == poptorch.Phase(*stages).stages == stages
    assert type(Options().Precision) is poptorch.options._GraphProcessingOptions
    for call in (lambda o: o.enablePipelining, lambda o: o.profile, lambda o: o.Jit.traceModel):
        with pytest.raises(AssertionError, match="Unexpected type"):
            call(Options())(torch.ones(2))


LOSS = torch.nn.MSELoss()
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1)
BOTH = {"loss": LOSS, "optimizer": OPTIMIZER}
CALLS = {
    "positions": (
        (True, 4, 3, (2, True, True, LOSS)),
        {"loss": LOSS, "device_iterations": 4, "gradient_accumulation": 3,
         "replication_factor": 2, "output_mode": OutputMode.Default}),
    "of inference": (
        (False, 5, 2), {"loss": None, "device_iterations": 5, "replication_factor": 2}),
    "keywords": (
        (True, None, OPTIMIZER, (),
         {"device_iterations": 6, "anchor_mode": "EveryN", "anchor_return_period": 3}),
        {"optimizer": OPTIMIZER, "device_iterations": 6, "output_mode": OutputMode.EveryN,
         "output_return_period": 3}),
    "one keyword": ((True, None, None, (), {"replication_factor": 3}),
                    {"device_iterations": 1, "gradient_accumulation": 1, "replication_factor": 3}),
    "tracing": ((True, 4, None, (), {"trace_model": True}), {"device_iterations": 4}),
    "a mode in capitals": (
        (False, 1, None, (), {"anchor_mode": "ALL"}), {"output_mode": OutputMode.All}),
    "a loss, an optimizer": ((True, Options(), LOSS, (OPTIMIZER,)), BOTH),
    "an optimizer, a loss": ((True, Options(), OPTIMIZER, (LOSS,)), BOTH),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_first_releases(name: str, caplog) -> None:
    arguments, expected = CALLS[name]
    call = read_call(*arguments)
    values = call.options._values | call.options.Training._values
    values |= {"loss": call.loss, "optimizer": call.optimizer}
    assert {key: values[key] for key in expected} == expected
    assert ("engineOptions" in call.options._Popart.options) is (name == "positions")
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_the_modern_call_does_not_warn_and_what_means_nothing_does(caplog) -> None:
    options = Options()
    call = read_call(True, options, OPTIMIZER)
    assert (call.options, call.optimizer, call.loss) == (options, OPTIMIZER, None)
    assert isinstance(read_call(False).options, Options)
    assert not caplog.records
    read_call(False, 4, keywords={"anchor_return_period": 3})
    assert "anchor_return_period=3 is ignored" in caplog.text


def test_scripting_of_the_first_release_is_named_when_a_model_is_wrapped(monkeypatch, caplog):
    monkeypatch.setattr(overview, "_reported", set())
    options = read_call(True, 4, keywords={"trace_model": False}).options
    assert options.withoutEffect() == ["Jit.traceModel"]
    caplog.clear()
    for _ in range(2):
        prepare(options.clone(), training=True)
    (line,) = caplog.messages
    assert line.startswith("Jit.traceModel has no effect here.")
    assert "freezes Python's branches and numbers" in line


@pytest.mark.parametrize("training, arguments, error", [
    (True, ("options",), poptorch.Error),
    (True, (Options(), None, (), {"device_iterations": 3}), poptorch.Error),
    (True, (4, None, (), {"device_iterations": 3}), TypeError),
    (True, (4, None, (), {"anchor_mode": "some"}), ValueError),
    (False, (Options(), torch.nn.MSELoss()), TypeError),
    (False, (1, 1, (False, True, "ALL", None, "more")), TypeError),
    (True, (Options(), torch.nn.MSELoss(), (torch.nn.MSELoss(),)), TypeError),
    (True, (Options(), None, (), {"loss": torch.nn.MSELoss}), TypeError),
])  # fmt: skip
def test_calls_that_are_refused(training: bool, arguments, error) -> None:
    with pytest.raises(error):
        read_call(training, *arguments)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_a_number_named_options_is_no_count(wrap, caplog) -> None:
    with pytest.raises(poptorch.Error, match="3, of type int"):
        wrap(torch.nn.Linear(2, 2), options=3)
    assert wrap(torch.nn.Linear(2, 2), 3).options.device_iterations == 3
