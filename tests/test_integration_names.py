"""Private names of PopTorch that integrations of other libraries read."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Graded, normal, options, saved
from poptorch import poptorch_core
from poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._poplar_executor import PoplarExecutor

X, Y = normal(4, 3), normal(4, 2)


class Net(Graded):
    """A layer and its mean squared error."""

    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 2))


@pytest.fixture
def training() -> poptorch.PoplarExecutor:
    """Return a wrapped model that is not compiled."""
    return poptorch.trainingModel(Net(), options())


def test_a_wrapped_model_is_a_poplar_executor(training: poptorch.PoplarExecutor) -> None:
    assert isinstance(training, PoplarExecutor)


def test_before_the_first_call_no_executable_exists(training: poptorch.PoplarExecutor) -> None:
    assert not training._executable
    assert training._executable_inputs is None


def test_after_a_call_an_executable_with_its_inputs_exists(
    training: poptorch.PoplarExecutor,
) -> None:
    training(X, Y)

    x, y = training._executable_inputs.args
    assert training._executable
    assert x.shape == X.shape
    assert y.dtype == Y.dtype


def test_after_destroy_no_executable_exists(training: poptorch.PoplarExecutor) -> None:
    training(X, Y)

    training.destroy()

    assert not training._executable


def test_private_names_of_the_model_and_the_options_are_those_of_the_public(
    training: poptorch.PoplarExecutor,
) -> None:
    assert training._user_model is training.model
    assert training._options is training.options


def test_the_program_can_be_printed_for_debugging(training: poptorch.PoplarExecutor) -> None:
    training(X, Y)

    assert "mse_loss" in training._debugGetPopartIR()


def test_an_unwrapped_model_has_its_own_class_also_when_it_is_saved(
    training: poptorch.PoplarExecutor,
) -> None:
    unwrapModelIfNecessary(training.model)

    assert type(training.model) is Net
    assert type(saved(training.model, weights_only=False)) is Net


def test_a_model_can_be_wrapped_again(training: poptorch.PoplarExecutor) -> None:
    unwrapModelIfNecessary(training.model)

    rewrapModelIfNecessary(training.model)

    assert type(training.model).__name__ == "PoptorchNet"


def test_destroy_unwraps_the_model(training: poptorch.PoplarExecutor) -> None:
    training.destroy()

    assert type(training.model) is Net


# Errors of the engine module.

KINDS = poptorch_core.TestErrorType


@pytest.mark.spec("ops", 31)
def test_the_engine_module_has_the_error_of_poptorch() -> None:
    assert poptorch_core.Error is poptorch.Error


@pytest.mark.spec("ops", 31)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_error_of_the_engine_has_type_message_and_location(kind: KINDS) -> None:
    with pytest.raises(poptorch.Error) as raised:
        poptorch_core._throwTestError(kind)

    assert raised.value.type == kind.value
    assert raised.value.message == f"This is a test of {kind.name}"
    assert raised.value.location.startswith("[0] ")


@pytest.mark.spec("ops", 31)
def test_a_recoverable_error_names_the_action() -> None:
    with pytest.raises(poptorch.RecoverableError) as raised:
        poptorch_core._throwTestError(KINDS.PoplarRecoverableFullReset)

    assert raised.value.recovery_action == "FULL_RESET"


@pytest.mark.spec("ops", 31)
def test_an_unrecoverable_error_has_its_own_class() -> None:
    with pytest.raises(poptorch.UnrecoverableError):
        poptorch_core._throwTestError(KINDS.PoplarUnrecoverable)


@pytest.mark.spec("ops", 31)
def test_an_error_of_poptorch_itself_has_no_location_in_the_engine(
    training: poptorch.PoplarExecutor,
) -> None:
    with pytest.raises(poptorch_core.Error) as raised:
        training(torch.ones(2, 7), nonsense=1)

    assert isinstance(raised.value, poptorch.Error)
    assert raised.value.type == "poptorch_py_error"
    assert raised.value.location == ""
    assert "'nonsense' is not a valid parameter" in raised.value.message


@pytest.mark.spec("ops", 31)
def test_users_can_create_an_error() -> None:
    mine = poptorch.createPoptorchError("mine")

    assert mine.type == "poptorch_py_error"
    assert mine.message == "mine"
    assert mine.location == ""


@pytest.mark.spec("ops", 31)
def test_the_engine_module_checks_options() -> None:
    with pytest.raises(poptorch.Error, match="Unknown"):
        poptorch_core._validateOptions({"nonsense": True})
