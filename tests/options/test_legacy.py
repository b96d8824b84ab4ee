"""Spellings of earlier releases: names of options, and arguments of the wrappers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from poptorch.autocasting import Policy
from poptorch.enums import AnchorMode, OutputMode, ReductionType
from poptorch.options import Options, ShardedExecution, overview
from poptorch.options.freeze_options import prepare
from poptorch.options.legacy_call import WrapCall, read_call

# Names of options.


def anchored(options: Options) -> list[Any]:
    """The anchor that the keyword of earlier releases makes."""
    options.anchorTensor("a", "b", anchor_mode=AnchorMode.All)
    anchor: list[Any] = options.anchored_tensors["a"]
    return anchor


def period_by_the_old_name(options: Options) -> Any:
    options.anchor_return_period = 3
    return options.output_return_period


def strategy_without_pipelining(options: Options) -> type:
    return type(options.enablePipelining(False)._execution_strategy)


def reduction(options: Options) -> Any:
    training = options.Training.accumulationReductionType(ReductionType.Sum)
    return training.accumulation_and_replication_reduction_type


POLICY = Policy([torch.mm], [], [], [])


@pytest.mark.spec("options", 34)
@pytest.mark.parametrize(
    "use, expected",
    [
        pytest.param(
            lambda o: o.anchorMode(AnchorMode.EveryN, anchor_return_period=2).output_return_period,
            2,
            id="anchorMode",
        ),
        pytest.param(lambda o: o.defaultAnchorMode(), True, id="defaultAnchorMode"),
        pytest.param(lambda o: o.anchor_mode, OutputMode.Default, id="anchor_mode"),
        pytest.param(period_by_the_old_name, 3, id="anchor_return_period"),
        pytest.param(anchored, ["b", False, OutputMode.All, 1], id="anchorTensor(anchor_mode=)"),
        pytest.param(lambda o: o.Popart is o._Popart, True, id="Popart"),
        pytest.param(lambda o: o._Popart.Set("a", 1).options["a"], 1, id="_Popart.Set"),
        pytest.param(
            lambda o: o._Popart.setPartialsType(torch.half).options["partialsTypeMatMuls"],
            "half",
            id="_Popart.setPartialsType",
        ),
        pytest.param(lambda o: o.GraphProcessing is o.Precision, True, id="GraphProcessing"),
        pytest.param(strategy_without_pipelining, ShardedExecution, id="enablePipelining"),
        pytest.param(
            lambda o: "engineOptions" in o.profile(True)._Popart.options, True, id="profile"
        ),
        pytest.param(reduction, ReductionType.Sum, id="accumulationReductionType"),
        pytest.param(lambda o: o.Jit.traceModel(True) is o.Jit, True, id="traceModel"),
        pytest.param(
            lambda o: o.Precision.runningStatisticsAlwaysFloat(True) is o.Precision,
            True,
            id="runningStatisticsAlwaysFloat",
        ),
        pytest.param(
            lambda o: o.Precision.runningVarianceAlwaysFloat(False) is o.Precision,
            True,
            id="runningVarianceAlwaysFloat",
        ),
        pytest.param(
            lambda o: o.Precision.autocastEnabled(True) is o.Precision, True, id="autocastEnabled"
        ),
        pytest.param(
            lambda o: o.Precision.halfFloatCasting("anything") is o.Precision,
            True,
            id="halfFloatCasting",
        ),
        pytest.param(
            lambda o: o.Precision.autocastPolicy(POLICY) is o.Precision, True, id="autocastPolicy"
        ),
    ],
)
def test_an_old_name_of_an_option_works_with_one_warning(
    use: Callable[[Options], Any], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert use(Options()) == expected

    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "deprecated" in warning.getMessage()


def test_old_names_of_types_are_the_new_types() -> None:
    assert AnchorMode is OutputMode
    assert poptorch.SyncPattern.PingPong is poptorch.SyncPattern.ReplicaAndLadder
    assert type(Options().Precision) is poptorch.options._GraphProcessingOptions


def test_a_phase_takes_a_list_of_stages() -> None:
    stages = [poptorch.Stage("a"), poptorch.Stage("b")]

    assert poptorch.Phase(stages).stages == stages


@pytest.mark.parametrize(
    "setter",
    [lambda o: o.enablePipelining, lambda o: o.profile, lambda o: o.Jit.traceModel],
    ids=["enablePipelining", "profile", "traceModel"],
)
def test_an_old_setter_checks_the_type_of_its_argument(
    setter: Callable[[Options], Callable[[Any], object]],
) -> None:
    with pytest.raises(AssertionError, match="Unexpected type"):
        setter(Options())(torch.ones(2))


# Arguments of the wrappers.

LOSS = torch.nn.MSELoss()
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1)


def values_of(call: WrapCall) -> dict[str, Any]:
    """Options, loss and optimizer of a call, by name."""
    values = call.options._values | call.options.Training._values
    return {**values, "loss": call.loss, "optimizer": call.optimizer}


# Whether it is for training, the first and second argument, the other ones, and keywords.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
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
    "one keyword": (
        (True, None, None, (), {"replication_factor": 3}),
        {"device_iterations": 1, "gradient_accumulation": 1, "replication_factor": 3}),
    "tracing": ((True, 4, None, (), {"trace_model": True}), {"device_iterations": 4}),
    "a mode in capitals": (
        (False, 1, None, (), {"anchor_mode": "ALL"}), {"output_mode": OutputMode.All}),
    "a loss, an optimizer": (
        (True, Options(), LOSS, (OPTIMIZER,)), {"loss": LOSS, "optimizer": OPTIMIZER}),
    "an optimizer, a loss": (
        (True, Options(), OPTIMIZER, (LOSS,)), {"loss": LOSS, "optimizer": OPTIMIZER}),
}  # fmt: skip


@pytest.mark.spec("options", 34)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_first_releases_works_with_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments, expected = CALLS[name]

    values = values_of(read_call(*arguments))

    assert {key: values[key] for key in expected} == expected
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_first_releases_profiles_only_if_it_says_so(name: str) -> None:
    arguments, _ = CALLS[name]

    engine_options = read_call(*arguments).options._Popart.options

    assert ("engineOptions" in engine_options) is (name == "positions")


def test_a_call_with_options_and_an_optimizer_causes_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = Options()

    call = read_call(True, options, OPTIMIZER)

    assert call.options is options
    assert call.optimizer is OPTIMIZER
    assert call.loss is None
    assert caplog.messages == []


def test_an_optimizer_in_the_place_of_the_options_is_to_be_named() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(poptorch.Error, match=r"trainingModel\(model, optimizer=optimizer\)"):
        poptorch.trainingModel(model, optimizer)


def test_a_call_without_options_has_the_defaults(caplog: pytest.LogCaptureFixture) -> None:
    call = read_call(False)

    assert repr(call.options) == repr(Options())
    assert caplog.messages == []


def test_a_period_without_a_mode_is_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    read_call(False, 4, keywords={"anchor_return_period": 3})

    assert "anchor_return_period=3 is ignored" in caplog.text


def test_scripting_of_the_first_release_is_named_once_when_a_model_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overview, "_reported", set())
    options = read_call(True, 4, keywords={"trace_model": False}).options
    caplog.clear()

    prepare(options.clone(), training=True)
    prepare(options.clone(), training=True)

    (line,) = caplog.messages
    assert options.withoutEffect() == ["Jit.traceModel"]
    assert line.startswith("Jit.traceModel has no effect here.")
    assert "Python branches and numbers become constants" in line


@pytest.mark.parametrize(
    "training, arguments, error",
    [
        (True, ("options",), poptorch.Error),
        (True, (Options(), None, (), {"device_iterations": 3}), poptorch.Error),
        (True, (4, None, (), {"device_iterations": 3}), TypeError),
        (True, (4, None, (), {"anchor_mode": "some"}), ValueError),
        (False, (Options(), torch.nn.MSELoss()), TypeError),
        (False, (1, 1, (False, True, "ALL", None, "more")), TypeError),
        (True, (Options(), torch.nn.MSELoss(), (torch.nn.MSELoss(),)), TypeError),
        (True, (Options(), None, (), {"loss": torch.nn.MSELoss}), TypeError),
    ],
    ids=[
        "options that are a text",
        "options and a keyword",
        "a count given twice",
        "an unknown mode",
        "a loss in inference",
        "too many arguments",
        "two losses",
        "a class as a loss",
    ],
)
def test_arguments_that_no_release_took_are_refused(
    training: bool, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_call(training, *arguments)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_a_number_named_options_is_refused(wrap: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match="3, of type int"):
        wrap(torch.nn.Linear(2, 2), options=3)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_a_number_in_the_place_of_options_is_a_count_of_iterations(
    wrap: Callable[..., Any],
) -> None:
    assert wrap(torch.nn.Linear(2, 2), 3).options.device_iterations == 3
