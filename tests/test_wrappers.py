"""The wrappers: what they accept, and what they make of a model's modes and methods."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Classifier, Having, Scaled, normal, options, trains_alike

X, Y = normal(4, 3), torch.tensor([0, 1, 1, 0])

Wrap = Callable[..., poptorch.PoplarExecutor]
each_wrapper = pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")


# Options.


@pytest.mark.spec("options", 1, 2, 3, 31)
@pytest.mark.spec("programs", 2)
@pytest.mark.parametrize(
    "change",
    [
        lambda opts: opts.deviceIterations(2),
        lambda opts: opts.Training.gradientAccumulation(2),
        lambda opts: opts._Popart.set("enableOutlining", True),
    ],
)
def test_options_are_frozen_when_they_are_used(change: Callable[[poptorch.Options], Any]) -> None:
    opts = options()
    poptorch.trainingModel(Classifier(), opts)

    with pytest.raises(AttributeError, match="frozen"):
        change(opts)


@pytest.mark.spec("options", 1, 2, 3, 31)
def test_options_of_a_wrapper_are_frozen() -> None:
    training = poptorch.trainingModel(Classifier(), options())

    with pytest.raises(AttributeError, match="frozen"):
        training.options.deviceIterations(2)


@pytest.mark.spec("options", 1, 2, 3, 31)
def test_a_copy_of_frozen_options_can_be_changed() -> None:
    opts = options(iterations=1)
    poptorch.trainingModel(Classifier(), opts)

    copied = opts.clone().deviceIterations(2)

    assert copied.device_iterations == 2
    assert opts.device_iterations == 1


@pytest.mark.spec("options", 1, 2, 3, 31)
@pytest.mark.spec("programs", 2)
def test_wrappers_and_loaders_share_options_and_each_has_its_own_default_of_the_mode() -> None:
    opts = options(iterations=2)

    training = poptorch.trainingModel(Classifier(), opts).options.toDict()
    validation = poptorch.inferenceModel(Classifier(), opts).options.toDict()
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(X), batch_size=2)

    assert training["output_mode"] == poptorch.OutputMode.Final
    assert validation["output_mode"] == poptorch.OutputMode.All
    assert opts.defaultOutputMode()
    assert training["device_iterations"] == 2
    assert validation["device_iterations"] == 2


@pytest.mark.spec("options", 24)
@pytest.mark.spec("programs", 11)
def test_settings_of_popart_are_checked_at_compile() -> None:
    opts = options()
    opts._Popart.set("enableOutlinng", True)
    wrapper = poptorch.inferenceModel(Classifier(), opts)

    with pytest.raises(poptorch.Error, match=r"Unknown bool option: enableOutlinng"):
        wrapper(X)


@pytest.mark.spec("options", 24)
@pytest.mark.spec("programs", 11)
def test_a_model_can_be_wrapped_again_after_its_settings_were_refused() -> None:
    model, opts = Classifier(), options()
    opts._Popart.set("enableOutlinng", True)
    with pytest.raises(poptorch.Error):
        poptorch.inferenceModel(model, opts)(X)

    assert poptorch.inferenceModel(model, options())(X).shape == (4, 2)


@pytest.mark.spec("options", 24)
def test_an_output_period_that_does_not_divide_the_iterations_is_refused_at_compile() -> None:
    opts = options(iterations=3).outputMode(poptorch.OutputMode.EveryN, 2)
    wrapper = poptorch.inferenceModel(Classifier(), opts)

    with pytest.raises(poptorch.Error, match="must divide"):
        wrapper(X[:3])


# What is wrapped.


def test_a_function_can_be_wrapped() -> None:
    assert torch.equal(poptorch.inferenceModel(torch.neg, options())(X), -X)


def test_a_class_in_place_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module or a callable"):
        poptorch.inferenceModel(Classifier, options())


def test_options_of_another_type_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="Invalid type: 'options'"):
        poptorch.trainingModel(Classifier(), {"a": 1})


class Strange(torch.Tensor):
    """An unknown subclass of tensors."""


def test_a_buffer_of_another_class_of_tensors_is_refused() -> None:
    model = Classifier()
    model.register_buffer("strange", torch.ones(2).as_subclass(Strange))

    with pytest.raises(poptorch.Error, match="All buffers must be an instance of"):
        poptorch.trainingModel(model, options())


class Counted(nn.Parameter):
    """A class of parameters with operators of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("no operator of it is called")


@each_wrapper
def test_a_parameter_whose_class_redefines_operators_is_refused_by_name(wrap: Wrap) -> None:
    model = Having(lambda m, x: x * m.weight, weight=Counted(torch.ones(3)))

    with pytest.raises(poptorch.Error, match="'weight' is a Counted"):
        wrap(model, options())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_code_without_weights_is_captured() -> None:
    model = Scaled(torch.jit.script(nn.ReLU()), (2,))

    trains_alike(model, torch.tensor([1.0, -3.0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@each_wrapper
@pytest.mark.parametrize(
    "make",
    [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(2))],
    ids=["scripted", "traced"],
)
def test_scripted_code_with_weights_is_refused(
    make: Callable[[nn.Module], nn.Module], wrap: Wrap
) -> None:
    layer = make(nn.Linear(2, 2))

    with pytest.raises(TypeError, match="TorchScript"):
        wrap(layer, options())
    with pytest.raises(TypeError, match="TorchScript"):
        wrap(Scaled(layer), options())


# Modes.


def modes_of(m: Having, x: torch.Tensor) -> tuple[bool, bool]:
    """Return the modes of a model and of its layer."""
    return m.training, m.sub.training


@pytest.mark.spec("executor", 38)
def test_a_model_that_the_user_switches_stays_in_eval_mode_in_inference() -> None:
    """The executor has its own copy; the model itself may be switched for training."""
    model = Having(modes_of, sub=nn.Dropout(0.5))
    inference = poptorch.inferenceModel(model, options())
    for training in (False, True):
        model.train(training)

        assert inference(X) == (False, False)


@pytest.mark.spec("executor", 38)
def test_an_executor_that_the_user_switches_infers_in_that_mode() -> None:
    inference = poptorch.inferenceModel(Having(modes_of, sub=nn.Dropout(0.5)), options())

    inference.train()
    assert inference(X) == (True, True)

    inference.model.eval()
    assert inference(X) == (False, False)


def layer_modes(m: Having, x: torch.Tensor) -> tuple[bool, ...]:
    """Return the modes of a model and of its two layers."""
    return m.training, m.first.training, m.second.training


def inference_in_eval_mode(
    make: Callable[..., Having] = Having,
) -> tuple[Having, poptorch.PoplarExecutor]:
    """Return a model in training mode with two layers, and its inference model in eval mode."""
    model = make(layer_modes, first=nn.Dropout(0.5), second=nn.Dropout(0.5))
    inference = poptorch.inferenceModel(model, options())
    inference.eval()
    return model, inference


@pytest.mark.spec("executor", 38)
@pytest.mark.parametrize("has_run", [True, False])
def test_a_single_layer_of_an_inference_model_follows_its_own_mode(has_run: bool) -> None:
    model, inference = inference_in_eval_mode()
    if has_run:
        assert inference(X) == (False, False, False)

    model.second.train()
    assert inference(X) == (False, False, True)

    model.second.eval()
    assert inference(X) == (False, False, False)


@pytest.mark.spec("executor", 38)
def test_a_layer_in_training_mode_goes_to_eval_mode_with_the_inference_model() -> None:
    model, inference = inference_in_eval_mode()
    model.first.train()
    inference(X)

    inference.eval()

    assert inference(X) == (False, False, False)


@pytest.mark.spec("executor", 38)
def test_a_single_layer_in_training_mode_normalizes_by_the_batch_as_in_eager_pytorch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    eager = copy.deepcopy(model)
    inference = poptorch.inferenceModel(model, options())
    inference.eval()
    eager.eval()

    for switch in (lambda each: each[1].train(), lambda each: each[1].eval()):
        switch(model)
        switch(eager)

        torch.testing.assert_close(inference(X), eager(X))


class Freezing(Having):
    """A model whose first layer is never in training mode."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.first.eval()
        return self


@pytest.mark.spec("executor", 38)
@pytest.mark.parametrize("make", [Having, Freezing])
def test_training_the_model_again_does_not_train_the_inference_model(
    make: Callable[..., Having],
) -> None:
    model, inference = inference_in_eval_mode(make)
    model.eval()
    inference(X)

    for _ in range(2):
        model.train()
        assert inference(X) == (False, False, False)

        inference.eval()
        assert inference(X) == (False, False, False)


def loss_in_training(model: Having, x: torch.Tensor) -> tuple[Any, ...]:
    """Return the modes of a model and of its layers, and a loss in training mode."""
    out = model.sub(x)
    loss = (nn.functional.mse_loss(out, x),) if model.training else ()
    return (out, model.training, model.sub.training, *loss)


def model_with_dropout() -> Having:
    """Return a model with layers that have a mode."""
    return Having(loss_in_training, sub=nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))


@pytest.mark.spec("executor", 38)
def test_a_training_model_stays_in_training_mode_and_its_layers_have_the_users_mode() -> None:
    model = model_with_dropout()
    wrapper = poptorch.trainingModel(model, options(accumulation=2))
    for training in (True, False, True, False):
        model.train(training)

        _, outermost, layers, loss = wrapper(X)

        assert outermost is True
        assert layers is training
        assert loss.numel() == 1


@pytest.mark.spec("executor", 38)
def test_one_warning_says_that_layers_are_in_eval_mode_in_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_with_dropout()
    wrapper = poptorch.trainingModel(model, options(accumulation=2))

    for training in (True, False, True, False):
        model.train(training)
        wrapper(X)

    assert caplog.text.count("in eval mode during training") == 1


@pytest.mark.spec("executor", 38)
def test_a_model_that_is_trained_infers_in_eval_mode() -> None:
    model = model_with_dropout()
    training = poptorch.trainingModel(model, options(accumulation=2))
    inference = poptorch.inferenceModel(model, options())
    training(X)

    model.eval()

    assert inference(X)[1:] == (False, False)


# Methods.


RETURNING = {
    "to": lambda model: model.to("cpu"),
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "type": lambda model: model.type(torch.float32),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "apply": lambda model: model.apply(lambda layer: None),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "a method of the user's": lambda model: model.freeze(),
    "several in one line": lambda model: model.to("cpu").float().train(),
}


class Freezing(Classifier):
    """Has a method that returns the model."""

    def freeze(self) -> "Freezing":
        self.layer.bias.requires_grad_(False)
        return self


@each_wrapper
@pytest.mark.parametrize("call", RETURNING.values(), ids=RETURNING)
def test_methods_that_return_the_module_return_the_executor(
    wrap: Wrap, call: Callable[[Any], Any]
) -> None:
    executor = wrap(Freezing(), options())

    assert call(executor) is executor


def test_methods_that_return_something_else_are_the_modules_own() -> None:
    model = Classifier()

    executor = poptorch.trainingModel(model, options())

    assert executor.get_submodule("layer") is model.layer
    assert executor.state_dict().keys() == model.state_dict().keys()
    assert executor.forward.__name__ == "forward"
