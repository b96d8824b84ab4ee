"""Spellings of earlier releases: each works and gives one warning (spec/options.md section 7)."""

import pytest
import torch

import poptorch
from poptorch._base.errors import Error
from poptorch.autocasting import Policy
from poptorch.enums import AnchorMode, OutputMode, ReductionType
from poptorch.options import Options, PipelinedExecution, ShardedExecution, overview
from poptorch.options.freeze import prepare
from poptorch.options.legacy_call import read_call


@pytest.fixture
def one_warning(caplog):
    """Fail unless the test logs exactly one deprecation warning."""
    yield
    warnings = [record for record in caplog.get_records("call") if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "deprecated" in warnings[0].getMessage()


def test_anchor_mode_is_output_mode(one_warning):
    options = Options()
    assert AnchorMode is OutputMode
    assert options.anchorMode(AnchorMode.EveryN, anchor_return_period=2) is options
    assert (options.output_mode, options.output_return_period) == (OutputMode.EveryN, 2)


def test_default_anchor_mode(one_warning):
    assert Options().defaultAnchorMode() is True


def test_reading_anchor_mode(one_warning):
    assert Options().anchor_mode == OutputMode.Default


def test_writing_anchor_return_period(one_warning):
    options = Options()
    options.anchor_return_period = 3
    assert options.output_return_period == 3


def test_anchor_tensor_with_an_old_keyword(one_warning):
    options = Options()
    options.anchorTensor("a", "b", anchor_mode=AnchorMode.All)
    assert options.anchored_tensors["a"] == ["b", False, OutputMode.All, 1]


def test_popart(one_warning):
    options = Options()
    assert options.Popart is options._Popart


def test_popart_set(one_warning):
    popart = Options()._Popart
    assert popart.Set("a", 1).options["a"] == 1


def test_graph_processing(one_warning):
    options = Options()
    assert options.GraphProcessing is options.Precision
    assert type(options.Precision) is poptorch.options._GraphProcessingOptions


@pytest.mark.parametrize("enabled, cls", [(True, PipelinedExecution), (False, ShardedExecution)])
def test_enable_pipelining(one_warning, enabled, cls):
    assert type(Options().enablePipelining(enabled)._execution_strategy) is cls


@pytest.mark.parametrize("enabled", [True, False])
def test_profile(one_warning, enabled):
    options = Options().profile(enabled)
    assert ("engineOptions" in options._Popart.options) is enabled


def test_accumulation_reduction_type(one_warning):
    training = Options().Training.accumulationReductionType(ReductionType.Sum)
    assert training.accumulation_and_replication_reduction_type is ReductionType.Sum


@pytest.mark.parametrize(
    "call",
    [
        lambda precision: precision.runningVarianceAlwaysFloat(False),
        lambda precision: precision.autocastEnabled(True),
        lambda precision: precision.autocastPolicy(Policy([torch.mm], [], [], [])),
        lambda precision: precision.halfFloatCasting(None),
    ],
)
def test_precision_settings_without_effect(one_warning, call):
    precision = Options().Precision
    assert call(precision) is precision


def test_the_modern_call_does_not_warn(caplog):
    options = Options()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    call = read_call(True, options, optimizer)
    assert (call.options, call.optimizer, call.loss) == (options, optimizer, None)
    assert isinstance(read_call(False).options, Options)
    assert not caplog.records


def test_the_call_of_the_first_release(one_warning):
    loss = torch.nn.MSELoss()
    call = read_call(True, 4, 3, (2, True, True, loss))
    assert call.loss is loss
    assert call.options.device_iterations == 4
    assert call.options.Training.gradient_accumulation == 3
    assert call.options.replication_factor == 2
    assert "engineOptions" in call.options._Popart.options
    assert call.options.defaultOutputMode()


def test_the_call_of_the_first_release_with_keywords(one_warning):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    keywords = {"device_iterations": 6, "anchor_mode": "EveryN", "anchor_return_period": 3}
    call = read_call(True, None, optimizer, (), keywords)
    assert call.optimizer is optimizer
    assert call.options.device_iterations == 6
    assert call.options.output_mode == OutputMode.EveryN
    assert call.options.output_return_period == 3


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"anchor_return_period": 3}, "anchor_return_period=3 is ignored"),
    ],
)
def test_what_the_first_release_took_and_means_nothing_says_so(keywords, says, caplog):
    call = read_call(False, 4, keywords=keywords)
    assert call.options.device_iterations == 4
    assert says in caplog.text


def test_scripting_of_the_first_release_is_named_when_a_model_is_wrapped(monkeypatch, caplog):
    monkeypatch.setattr(overview, "_reported", set())
    options = read_call(True, 4, keywords={"trace_model": False}).options
    assert options.withoutEffect() == ["Jit.traceModel"]
    caplog.clear()
    for _ in range(2):
        prepare(options.clone(), training=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Jit.traceModel has no effect here.")
    assert "freezes Python's branches and numbers" in line


def test_scripting_is_chosen_with_a_truth_value():
    with pytest.raises(poptorch.Error, match="Unexpected type for trace_model"):
        Options().Jit.traceModel(torch.ones(2))


def test_a_call_of_the_first_release_with_tracing_says_nothing_of_it(one_warning):
    assert read_call(True, 4, keywords={"trace_model": True}).options.device_iterations == 4


def test_positional_order_differs_for_inference(one_warning):
    call = read_call(False, 5, 2)
    assert (call.options.device_iterations, call.options.replication_factor) == (5, 2)


@pytest.mark.parametrize("text", ["final", "ALL", "Sum"])
def test_anchor_modes_in_any_case(one_warning, text):
    call = read_call(False, 1, keywords={"anchor_mode": text})
    assert call.options.output_mode == OutputMode[text.capitalize()]


@pytest.mark.parametrize("order", [0, 1])
def test_a_loss_in_third_place(one_warning, order):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    loss = torch.nn.MSELoss()
    given = [loss, optimizer][:: -1 if order else 1]
    call = read_call(True, Options(), given[0], given[1:])
    assert (call.loss, call.optimizer) == (loss, optimizer)


@pytest.mark.parametrize(
    "training, arguments, error",
    [
        (True, ("options",), Error),
        (True, (Options(), None, (), {"device_iterations": 3}), Error),
        (True, (Options(), None, (), {"unknown": 3}), TypeError),
        (True, (4, None, (), {"device_iterations": 3}), TypeError),
        (True, (4, None, (), {"anchor_mode": "some"}), ValueError),
        (False, (Options(), torch.nn.MSELoss()), TypeError),
        (False, (4, None, (), {"loss": torch.nn.MSELoss()}), TypeError),
        (False, (1, 1, (False, True, "ALL", None, "more")), TypeError),
        (True, (Options(), torch.nn.MSELoss(), (torch.nn.MSELoss(),)), TypeError),
        (True, (Options(), torch.optim.SGD), TypeError),
        (True, (Options(), None, (), {"loss": torch.nn.MSELoss}), TypeError),
    ],
)
def test_calls_that_are_refused(training, arguments, error):
    with pytest.raises(error):
        read_call(training, *arguments)


def test_the_message_about_a_wrong_options_object():
    with pytest.raises(Error, match="Invalid type: 'options'"):
        read_call(False, {"deviceIterations": 3})
