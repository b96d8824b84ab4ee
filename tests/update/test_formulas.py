"""Every algorithm over 50 updates, against plain float64 and against torch's own optimizers."""

import pytest
import torch

import poptorch.optim
from helpers import plain_optimizers as plain
from helpers.updating import MODELS, Training, Workload

STEPS = 50
# name of the state here: key of the plain implementation's state
STATE = {
    "SGD": {"velocity": "v"},
    "Adam": {"first": "m", "second": "v"},
    "AdamW": {"first": "m", "second": "v"},
    "LAMB": {"first": "m", "second": "v"},
    "RMSprop": {"square": "v1", "mean": "v2", "momentum": "v3"},
}
CASES = [
    ("SGD", plain.sgd, {"lr": 0.1}),
    ("SGD", plain.sgd, {"lr": 0.1, "weight_decay": 0.02}),
    ("SGD", plain.sgd, {"lr": 0.1, "momentum": 0.9}),
    ("SGD", plain.sgd, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", plain.sgd, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    ("Adam", plain.adam, {}),
    ("Adam", plain.adam, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}),
    ("AdamW", plain.adamw, {}),
    ("AdamW", plain.adamw, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
    ("AdamW", plain.adamw, {"lr": 0.01, "bias_correction": False}),
    ("RMSprop", plain.rmsprop, {}),
    ("RMSprop", plain.rmsprop, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.01, "eps": 1e-6}),
    ("RMSprop", plain.rmsprop, {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-3}),
    ("RMSprop", plain.rmsprop, {"lr": 0.01, "use_tf_variant": True}),
    (
        "RMSprop",
        plain.rmsprop,
        {"lr": 0.01, "momentum": 0.5, "centered": True, "use_tf_variant": True},
    ),
    ("LAMB", plain.lamb, {}),
    ("LAMB", plain.lamb, {"lr": 0.01, "betas": (0.8, 0.99), "max_weight_norm": 0.5}),
    ("LAMB", plain.lamb, {"lr": 0.01, "weight_decay": 0.0, "bias_correction": False}),
]
IDS = [f"{name}-{'-'.join(settings) or 'default'}" for name, _, settings in CASES]


def make(name, parameters, settings, constant):
    optimizer = getattr(poptorch.optim, name)(parameters.values(), **settings)
    mark = optimizer.variable_attrs
    for attribute in (*optimizer.defaults, "loss_scaling"):
        (mark.markAsConstant if constant else mark.markAsVariable)(attribute)
    return optimizer


def close(got, want, factor=1.0):
    scale = float(want.abs().max())
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=factor * 2e-6 * scale + 1e-12)


@pytest.mark.spec("optimizers", 5)
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "variable"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name, function, settings", CASES, ids=IDS)
def test_equals_plain_float64(name, function, settings, model, constant):
    work = Workload(model)
    parameters = work.single()
    ours = Training(make(name, parameters, settings, constant), parameters)
    weights, state = {n: p.detach().double() for n, p in parameters.items()}, {}
    for t in range(1, STEPS + 1):
        work.take(weights)
        gradients = {n: g.float() for n, g in work.gradients().items()}
        ours.step(gradients)
        exact = {n: g.double() for n, g in gradients.items()}
        weights = function(weights, exact, state, t, **settings)
    for path, want in weights.items():
        close(ours.weight(path), want)
        for what, key in STATE[name].items():
            if key in state.get(path, ()):
                close(ours.state(what, path), state[path][key], factor=10)


TORCH_CASES = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, ["velocity"]),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "maximize": True}, ["velocity"]),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}, ["first", "second"]),
    ("Adam", {"lr": 0.01, "maximize": True}, ["first", "second"]),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, ["first", "second"]),
    ("RMSprop", {"lr": 0.01}, ["square"]),
    (
        "RMSprop",
        {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-3},
        ["square", "mean", "momentum"],
    ),
]
TORCH_STATE = {
    "velocity": "momentum_buffer",
    "first": "exp_avg",
    "second": "exp_avg_sq",
    "square": "square_avg",
    "mean": "grad_avg",
    "momentum": "momentum_buffer",
}


@pytest.mark.spec("optimizers", 5, 24)
@pytest.mark.parametrize("library", [torch.optim, poptorch.optim], ids=["torch", "poptorch"])
@pytest.mark.parametrize("name, settings, moments", TORCH_CASES)
def test_equals_torch_with_its_state(library, name, settings, moments):
    work = Workload("perceptron")
    parameters = work.single()
    ours = Training(getattr(library, name)(parameters.values(), **settings), parameters)
    reference = getattr(torch.optim, name)(parameters.values(), **settings)
    for _ in range(STEPS):
        work.take({n: p.detach().double() for n, p in parameters.items()})
        gradients = {n: g.float() for n, g in work.gradients().items()}
        ours.step(gradients)
        for path, parameter in parameters.items():
            parameter.grad = gradients[path]
        reference.step()
    for path, parameter in parameters.items():
        close(ours.weight(path), parameter.detach().double())
        for what in moments:
            want = reference.state[parameter][TORCH_STATE[what]]
            close(ours.state(what, path), want.double(), factor=10)


@pytest.mark.spec("optimizers", 24)
def test_the_tensorflow_variant_differs_from_the_first_step():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    results = []
    for variant in (False, True):
        optimizer = poptorch.optim.RMSprop([parameter], use_tf_variant=variant)
        ours = Training(optimizer, {"w": parameter})
        ours.step({"w": torch.tensor([0.5])})
        results.append(float(ours.weight("w")))
    assert results[0] == pytest.approx(1 - 0.01 * 0.5 / (0.01 * 0.25) ** 0.5)
    assert results[1] == pytest.approx(1 - 0.01 * 0.5 / (0.99 + 0.01 * 0.25) ** 0.5)


@pytest.mark.spec("optimizers", 25)
def test_lamb_trusts_the_update_of_a_zero_weight_and_a_zero_update():
    parameter = torch.nn.Parameter(torch.zeros(4))
    ours = Training(poptorch.optim.LAMB([parameter], lr=0.1), {"w": parameter})
    ours.step({"w": torch.ones(4)})
    torch.testing.assert_close(ours.weight("w"), torch.full((4,), -0.1))
    still = Training(poptorch.optim.LAMB([parameter], lr=0.1), {"w": parameter})
    still.step({"w": torch.zeros(4)})
    assert still.weight("w").tolist() == [0.0] * 4


@pytest.mark.spec("optimizers", 28)
def test_the_first_gradient_is_not_dampened():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, dampening=0.75)
    ours = Training(optimizer, {"w": parameter})
    ours.step({"w": torch.ones(1)})
    assert float(ours.weight("w")) == -1.0
    ours.step({"w": torch.ones(1)})
    assert float(ours.state("velocity", "w")) == 0.5 + 0.25


@pytest.mark.parametrize(("module", "share"), [(poptorch.optim, 0.25), (torch.optim, 1.0)])
def test_dampening_without_momentum_scales_the_rate_of_our_class_only(module, share: float):
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = module.SGD([parameter], lr=0.5, dampening=0.75, weight_decay=2.0)
    ours = Training(optimizer, {"w": parameter})
    ours.step({"w": torch.tensor([4.0])})
    assert float(ours.weight("w")) == 1 * (1 - 0.5 * share * 2) - 0.5 * share * 4


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_combined_sgd_equals_separate_for_constant_hyper_parameters(nesterov, dampening):
    if nesterov and dampening:
        dampening = 0.0
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    settings["dampening"] = dampening
    work = Workload("perceptron")
    parameters = work.single()
    combined = poptorch.optim.SGD(
        parameters.values(), use_combined_accum=True, velocity_scaling=8.0, **settings
    )
    ours = Training(combined, parameters)
    weights, state = {n: p.detach().double() for n, p in parameters.items()}, {}
    for t in range(1, STEPS + 1):
        work.take(weights)
        gradients = work.gradients()
        ours.step({n: g.float() for n, g in gradients.items()})
        weights = plain.sgd(weights, gradients, state, t, **settings)
    for path, want in weights.items():
        close(ours.weight(path), want, factor=5)


def test_combined_sgd_decays_one_step_late():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = poptorch.optim.SGD([parameter], lr=1.0, momentum=0.5, use_combined_accum=True)
    ours = Training(optimizer, {"w": parameter})
    ours.step({"w": torch.tensor([1.0])})  # w = 0, velocity for the next step 0.5
    optimizer.param_groups[0]["momentum"] = 0.0
    ours.set_values({"hyper.0.momentum": 0.0})
    ours.step({"w": torch.tensor([0.0])})  # still moves by the old momentum
    assert float(ours.weight("w")) == -0.5
    ours.step({"w": torch.tensor([0.0])})
    assert float(ours.weight("w")) == -0.5


@pytest.mark.spec("optimizers", 6)
@pytest.mark.parametrize("limit", [0.05, 1e3])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_clipping_equals_torch(name, limit):
    work = Workload("convolutional")
    parameters = work.single()
    ours = Training(
        getattr(poptorch.optim, name)(parameters.values(), lr=0.01, max_grad_norm=limit), parameters
    )
    reference = getattr(torch.optim, name)(parameters.values(), lr=0.01)
    for _ in range(10):
        work.take({n: p.detach().double() for n, p in parameters.items()})
        gradients = {n: g.float() for n, g in work.gradients().items()}
        ours.step(gradients)
        for path, parameter in parameters.items():
            parameter.grad = gradients[path].clone()
        torch.nn.utils.clip_grad_norm_(parameters.values(), limit)
        reference.step()
    for path, parameter in parameters.items():
        close(ours.weight(path), parameter.detach().double(), factor=20)


def test_clipping_spans_parameter_groups():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = poptorch.optim.SGD(
        [{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0, max_grad_norm=1.0
    )
    ours = Training(optimizer, {"a": a, "b": b})
    ours.step({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    torch.testing.assert_close(ours.weight("a"), torch.tensor([-0.6]))
    torch.testing.assert_close(ours.weight("b"), torch.tensor([-1.6]))


@pytest.mark.spec("optimizers", 3)
def test_a_group_with_rate_zero_stays_bit_identical():
    work = Workload("perceptron")
    parameters = work.single()
    first, *rest = parameters.values()
    groups = [{"params": [first], "lr": 0.0}, {"params": rest, "lr": 0.1}]
    ours = Training(torch.optim.SGD(groups, momentum=0.9), parameters)
    for _ in range(3):
        ours.step({n: g.float() for n, g in work.gradients().items()})
    changed = {n: not torch.equal(ours.weight(n), p.detach()) for n, p in parameters.items()}
    assert changed == {n: n != "0.weight" for n in parameters}


@pytest.mark.spec("optimizers", 23)
def test_weights_in_no_group_are_left_alone():
    work = Workload("perceptron")
    parameters = work.single()
    ours = Training(torch.optim.Adam([parameters["0.bias"]]), parameters)
    assert [slot.key for slot in ours.piece.outputs if slot.kind == "param"] == ["param.0.bias"]
    ours.step({n: g.float() for n, g in work.gradients().items()})
    assert torch.equal(ours.weight("0.weight"), parameters["0.weight"])
