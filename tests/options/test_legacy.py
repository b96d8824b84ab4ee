"""Spellings of earlier releases: each works and gives one warning (spec/options.md section 7)."""

import pytest
import torch

import poptorch
from poptorch.autocasting import Policy
from poptorch.enums import AnchorMode, OutputMode, ReductionType
from poptorch.options import Options, ShardedExecution, overview
from poptorch.options.freeze import prepare
from poptorch.options.legacy_call import read_call

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
