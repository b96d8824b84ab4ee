"""Training through the executor beside float64, beside torch, and cut into micro-batches."""

import copy
import functools

import pytest
import torch
from torch import nn

import poptorch
from helpers import plain_optimizers as plain
from helpers.updating import MODELS
from helpers.wrapping import options
from poptorch import MeanReductionStrategy, ReductionType

STEPS = 50
# State here -> key of the plain implementation's state.
STATE = {
    "SGD": {"Accl1": "v"},
    "Adam": {"Accl1": "m", "Accl2": "v"},
    "AdamW": {"Accl1": "m", "Accl2": "v"},
    "LAMB": {"Accl1": "m", "Accl2": "v"},
    "RMSprop": {"Accl1": "v1", "Accl2": "v2", "Accl3": "v3"},
}
CASES = [
    ("SGD", plain.sgd, {"lr": 0.1, "weight_decay": 0.02}),
    ("SGD", plain.sgd, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("Adam", plain.adam, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}),
    ("AdamW", plain.adamw, {"lr": 0.01}),
    ("RMSprop", plain.rmsprop, {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-3}),
    ("RMSprop", plain.rmsprop, {"lr": 0.01, "use_tf_variant": True, "momentum": 0.5}),
    ("LAMB", plain.lamb, {"lr": 0.01}),
    ("LAMB", plain.lamb, {"lr": 0.01, "weight_decay": 0.0, "bias_correction": False}),
]
IDS = [f"{name}-{'-'.join(settings)}" for name, _, settings in CASES]


class WithLoss(nn.Module):
    def __init__(self, model, reduction="mean"):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, x, labels):
        return self.loss(self.model(x), labels)


def workload(name, reduction="mean"):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return WithLoss(model, reduction), inputs, torch.randint(0, 3, (32,))


def close(got, want, factor=1.0):
    scale = float(want.abs().max())
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=factor * 2e-6 * scale + 1e-12)


@pytest.mark.spec("optimizers", 5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer, function, settings", CASES, ids=IDS)
def test_fifty_steps_equal_plain_float64(name, optimizer, function, settings):
    """The plain form follows the executor's own gradients; these are checked against autograd."""
    model, inputs, labels = workload(name)
    exact = copy.deepcopy(model).double()
    opts = options()
    paths = [path for path, _ in model.named_parameters()]
    for path in paths:
        opts.anchorTensor(path, f"Gradient___{path}")
    made = getattr(poptorch.optim, optimizer)(model.parameters(), **settings)
    wrapped = poptorch.trainingModel(model, opts, made)
    weights = {path: p.detach().double() for path, p in model.named_parameters()}
    state = {}
    for step in range(1, STEPS + 1):
        wrapped(inputs, labels)
        gradients = {path: wrapped.getAnchoredTensor(path).double() for path in paths}
        if step in (1, STEPS):
            check_gradients(exact, weights, inputs, labels, gradients)
        weights = function(weights, gradients, state, step, **settings)
    for path, parameter in model.named_parameters():
        close(parameter.detach(), weights[path])
    found = made.state_dict()["ipu_state"]
    for prefix, key in STATE[optimizer].items():
        for path in paths:
            if key in state.get(path, ()):
                close(found[f"{prefix}___{path}"], state[path][key], factor=10)


def check_gradients(exact, weights, inputs, labels, gradients):
    with torch.no_grad():
        for path, parameter in exact.named_parameters():
            parameter.copy_(weights[path])
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    wanted = torch.autograd.grad(exact(inputs, labels), list(exact.parameters()))
    for (path, _), want in zip(exact.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(gradients[path], want, rtol=2e-3, atol=2e-6)


@pytest.mark.spec("optimizers", 5)
@pytest.mark.parametrize(
    "optimizer, settings",
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01}),
        ("RMSprop", {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-3}),
    ],
)
@pytest.mark.parametrize("library", [torch.optim, poptorch.optim], ids=["torch", "poptorch"])
def test_fifty_steps_equal_torchs_loop(library, optimizer, settings):
    model, inputs, labels = workload("perceptron")
    eager = copy.deepcopy(model)
    native = getattr(torch.optim, optimizer)(eager.parameters(), **settings)
    made = getattr(library, optimizer)(model.parameters(), **settings)
    wrapped = poptorch.trainingModel(model, options(), made)
    for _ in range(STEPS):
        native.zero_grad()
        loss = eager(inputs, labels)
        loss.backward()
        native.step()
        torch.testing.assert_close(wrapped(inputs, labels), loss.detach(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "SGD combined": {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True},
    "Adam": {"lr": 0.01, "max_grad_norm": 0.1},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "LAMB": {"lr": 0.01},
}
MODES = [
    *((ReductionType.Mean, strategy) for strategy in MeanReductionStrategy),
    (ReductionType.Sum, MeanReductionStrategy.Post),
]


def optimizer_of(name, model):
    return getattr(poptorch.optim, name.split()[0])(model.parameters(), **OPTIMIZERS[name])


@functools.cache
def whole(name, reduction):
    """What one batch of 32 makes of the weights."""
    return trained(name, options(), reduction)[0]


def trained(name, opts, reduction):
    model, inputs, labels = workload("perceptron", reduction)
    wrapped = poptorch.trainingModel(model, opts, optimizer_of(name, model))
    for _ in range(3):
        wrapped(inputs, labels)
    return {path: p.detach().clone() for path, p in model.named_parameters()}, wrapped


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_micro_batches_of_four_equal_one_of_32(name, mode):
    """Each optimizer and each mode side by side and one after another, if not each pair of them."""
    kind, strategy = MODES[mode]
    lanes = (list(OPTIMIZERS).index(name) + mode) % 2  # 0: side by side
    reduction = "mean" if kind is ReductionType.Mean else "sum"
    want = whole(name, reduction)
    opts = options(accumulation=8)
    opts.lanes(lanes)
    opts.Training.accumulationAndReplicationReductionType(kind)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    got, wrapped = trained(name, opts, reduction)
    assert (wrapped._session.now.compiled.plan.program.lanes is None) == bool(lanes)
    for path, value in want.items():
        torch.testing.assert_close(got[path], value, rtol=1e-4, atol=2e-6)


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize("kind", [ReductionType.Mean, ReductionType.Sum])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "LAMB"])
def test_replicas_and_accumulation_together_equal_one_batch(name, kind):
    reduction = "mean" if kind is ReductionType.Mean else "sum"
    want = whole(name, reduction)
    opts = options(accumulation=4, replicas=2)
    opts.Training.accumulationAndReplicationReductionType(kind)
    got, _ = trained(name, opts, reduction)
    for path, value in want.items():
        torch.testing.assert_close(got[path], value, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("library", [torch.optim, poptorch.optim], ids=["torch", "poptorch"])
def test_two_thousand_rates_cause_no_compile(library):
    compiled = []
    handle = poptorch.registerPostCompileHook(lambda: compiled.append(1))
    model = nn.Linear(1, 1, bias=False).requires_grad_()
    with torch.no_grad():
        model.weight.zero_()

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return poptorch.identity_loss(self.inner(x), "sum")

    optimizer = library.SGD(model.parameters(), lr=0.0)
    wrapped = poptorch.trainingModel(Product(), options(), optimizer)
    x, total = torch.ones(1, 1), 0.0
    for step in range(2000):
        optimizer.param_groups[0]["lr"] = rate = 2.0**-12 * (step % 5)
        wrapped.setOptimizer(optimizer)
        wrapped(x)
        total += rate
    handle.remove()
    assert len(compiled) == 1
    assert float(model.weight.detach()) == -total


def test_a_rate_of_one_step_acts_in_that_step():
    model, inputs, labels = workload("perceptron")
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.0)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(inputs, labels)
    weight = model.model[0].weight
    before = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    wrapped.setOptimizer(optimizer)
    wrapped(inputs, labels)
    assert torch.equal(weight.detach(), before)
