"""Wrong use of optimizers: the documented error, and weights and state as they were."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.second(torch.tanh(self.first(x))), y)


def adam(model, **settings):
    return poptorch.optim.Adam(model.parameters(), lr=0.01, **settings)


def constant_changed(model, optimizer):
    optimizer.param_groups[0]["eps"] = 1e-3
    return optimizer


def constness_changed(model, optimizer):
    other = copy.copy(optimizer)
    other.variable_attrs.markAsVariable("weight_decay")
    return other


def group_added(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return optimizer


def weights_regrouped(model, optimizer):
    return poptorch.optim.Adam(model.first.parameters(), lr=0.01)


def rate_of_text(model, optimizer):
    optimizer.param_groups[0]["lr"] = "fast"
    return optimizer


CASES = {
    "a constant changed": (constant_changed, poptorch.Error, "constant but do not match"),
    "constness": (constness_changed, poptorch.Error, "cannot become variable"),
    "a group added": (group_added, poptorch.Error, "number of parameter groups"),
    "other weights": (weights_regrouped, poptorch.Error, "parameters of a group"),
    "another type": (
        lambda m, o: poptorch.optim.SGD(m.parameters(), lr=0.1),
        poptorch.Error,
        "type of the optimizer",
    ),
    "unsupported": (
        lambda m, o: torch.optim.Adagrad(m.parameters()),
        AssertionError,
        "Unsupported optimizer type",
    ),
    "no optimizer": (lambda m, o: "Adam", AssertionError, "Unsupported optimizer type"),
    "amsgrad": (lambda m, o: adam(m, amsgrad=True), ValueError, "Only non-amsgrad"),
    "half accumulators": (
        lambda m, o: adam(m, accum_type=torch.float16),
        ValueError,
        "is already compiled|already compiled with",
    ),
    "half moments": (
        lambda m, o: adam(m, first_order_momentum_accum_type=torch.float16),
        poptorch.Error,
        "first_order_momentum_accum_type",
    ),
    "no number": (rate_of_text, AssertionError, "Expected a number for lr"),
}


def everything(model, wrapped, optimizer):
    state = wrapped._session.store.state.tensors
    device = {key: value.clone() for key, value in state.items()}
    return {**{k: v.clone() for k, v in model.state_dict().items()}, **device}


@pytest.mark.parametrize("name", CASES)
def test_set_optimizer_refuses_and_changes_nothing(name):
    change, error, message = CASES[name]
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = adam(model)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    untouched = poptorch.trainingModel(twin, options(), adam(twin))
    for executor in (wrapped, untouched):
        executor(x, y)
    before = everything(model, wrapped, optimizer)
    with pytest.raises(error, match=message):
        wrapped.setOptimizer(change(model, optimizer))
    after = everything(model, wrapped, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    for executor in (wrapped, untouched):  # it goes on with what was compiled
        executor(x, y)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.spec("optimizers", 16)
def test_a_state_of_torch_is_refused_and_changes_nothing():
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    model = Net()
    optimizer = adam(model)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(x, y)
    native = torch.optim.Adam(Net().parameters())
    before = everything(model, wrapped, optimizer)
    state = optimizer.state_dict()["ipu_state"]
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
        optimizer.load_state_dict(native.state_dict())
    after = everything(model, wrapped, optimizer)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    now = optimizer.state_dict()["ipu_state"]
    assert all(torch.equal(value, now[key]) for key, value in state.items())
    wrapped(x, y)


@pytest.mark.parametrize("name", ["unsupported", "amsgrad"])
def test_wrapping_refuses_and_leaves_the_model_free(name):
    change, error, message = CASES[name]
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        poptorch.trainingModel(model, options(), change(model, None))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    poptorch.trainingModel(model, options(), adam(model))(torch.randn(4, 3), torch.randn(4, 2))


class Factor(nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x * 2)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_an_operator_that_fails_is_named_with_the_line(backend):
    model = poptorch.inferenceModel(Factor(), options().backend(backend))
    model(torch.eye(3))
    with pytest.raises(RuntimeError, match="not positive-definite") as native:
        Factor()(-torch.eye(3))
    with pytest.raises(poptorch.Error, match="operator of the program failed") as caught:
        model(-torch.eye(3))
    said = str(caught.value)
    assert str(native.value) in said
    assert "Fix:" in said
    assert "test_wrong_use.py:" in said
    if backend == "reference":
        assert "return torch.linalg.cholesky(x * 2)" in said
    assert isinstance(caught.value, RuntimeError)
    torch.testing.assert_close(model(torch.eye(3)), Factor()(torch.eye(3)))


def test_what_the_users_code_raises_while_a_program_runs_stays_his():
    def fails_below_zero(x):
        if bool((x < 0).any()):
            raise RuntimeError("no negatives")
        return x

    model = poptorch.inferenceModel(poptorch.CPU(fails_below_zero, "Fails"), options())
    model(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"^no negatives") as caught:
        model(-torch.ones(2))
    assert not isinstance(caught.value, poptorch.Error)
