"""Forms of other releases: arguments of the first ones, and names of ``experimental``."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Classifier, Having, normal, options

X, Y = normal(4, 3), torch.tensor([0, 1, 1, 0])


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")


# Arguments in the place of options.


@pytest.mark.spec("options", 34)
def test_counts_in_the_place_of_options_are_deprecated_in_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poptorch.trainingModel(
        Classifier(),
        loss=nn.NLLLoss(),
        device_iterations=1,
        gradient_accumulation=1,
        trace_model=True,
    )

    assert caplog.text.count("deprecated") == 1


@pytest.mark.spec("options", 34)
def test_a_model_without_an_optimizer_trains_by_sgd_with_a_rate_of_a_hundredth() -> None:
    model = Classifier()
    eager = copy.deepcopy(model)
    training = poptorch.trainingModel(model, loss=nn.NLLLoss(), device_iterations=1)

    out, loss = training(X, Y)

    expected = nn.functional.nll_loss(eager(X), Y)
    expected.backward()
    weight = eager.layer.weight - 0.01 * eager.layer.weight.grad
    assert out.shape == (4, 2)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.layer.weight, weight)


@pytest.mark.spec("options", 34)
def test_a_loss_that_is_an_argument_does_not_change_the_models_state() -> None:
    model = Classifier()

    poptorch.trainingModel(model, loss=nn.NLLLoss(), device_iterations=1)(X, Y)

    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}


@pytest.mark.spec("options", 34)
@pytest.mark.parametrize("container", [tuple, list])
def test_several_inputs_may_be_in_a_container_before_the_labels(container: type) -> None:
    model = Having(lambda m, a, b: (a + b) * m.scale, scale=nn.Parameter(torch.ones(1)))
    training = poptorch.trainingModel(model, 1, loss=nn.MSELoss())
    x, y = torch.ones(2), torch.zeros(2)

    out, _ = training(container([x, x]), y)

    assert out.shape == (2,)


@pytest.mark.spec("options", 34)
def test_the_output_mode_was_an_anchor_mode() -> None:
    inference = poptorch.inferenceModel(Classifier(), 2, anchor_mode="FINAL")

    assert inference(X).shape == (2, 2)


@pytest.mark.spec("options", 34)
def test_options_and_counts_are_refused_together() -> None:
    with pytest.raises(poptorch.Error, match="cannot be combined"):
        poptorch.trainingModel(Classifier(), poptorch.Options(), device_iterations=2)


@pytest.mark.spec("options", 34)
def test_a_count_that_no_release_had_is_refused() -> None:
    with pytest.raises(TypeError, match="Unexpected keyword argument"):
        poptorch.inferenceModel(Classifier(), batch_size=2)


# Names of experimental.


def test_a_function_becomes_a_program_by_ipu_context() -> None:
    doubled = poptorch.experimental.IPUContext(lambda x: 2 * x, compiler=poptorch.Compiler.PopART)

    assert torch.equal(doubled(X), 2 * X)


def test_a_decorated_function_of_a_model_becomes_a_program() -> None:
    net = Classifier()

    @poptorch.experimental.IPUContext(model=net, options=options())
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return net(x) + 1

    torch.testing.assert_close(shifted(X), net(X) + 1)


def test_ipu_scope_is_refused_and_ipu_context_named() -> None:
    with pytest.raises(NotImplementedError, match="IPUContext"):
        poptorch.experimental.IPUScope([X])
