"""Running update pieces eagerly, and the gradients of three small models to feed them with."""

from __future__ import annotations

import torch
from torch import nn

from poptorch._ir import slots
from poptorch._ir.slots import Kind
from poptorch._update import lower
from poptorch.optim.freeze import freeze


def frozen(optimizer, parameters):
    return freeze(optimizer, {p.data_ptr(): name for name, p in parameters.items()})


def zeros(piece):
    """The state that a piece introduces, with the values it starts from."""
    return {
        slot.key: torch.full(slot.shape, piece.initial.get(slot.key, 0.0), dtype=slot.dtype)
        for slot in piece.outputs
        if slot.kind in (Kind.OPTSTATE, Kind.ACCUM)
    }


class Training:
    """Parameters, optimizer state and hyper-parameters of one optimizer, as a device has them."""

    def __init__(self, optimizer, parameters, gradient_dtype=None):
        self.spec, values = frozen(optimizer, parameters)
        params = [slots.param(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
        self.piece = lower(self.spec, params, gradient_dtype)
        self.tensors = zeros(self.piece)
        self.tensors |= {f"param.{n}": p.detach().clone() for n, p in parameters.items()}
        self.set_values(values)

    def set_values(self, values):
        self.tensors |= {key: torch.tensor(value) for key, value in values.items()}

    def step(self, gradients):
        given = {f"gradient.{n}": g for n, g in gradients.items()}
        inputs = {slot.key for slot in self.piece.inputs}
        before = {k: v.clone() for k, v in (self.tensors | given).items() if k in inputs}
        results = self.piece.function(before)
        assert set(results) == {slot.key for slot in self.piece.outputs}
        for slot in self.piece.outputs:
            assert results[slot.key].dtype == slot.dtype
            assert tuple(results[slot.key].shape) == slot.shape
        self.tensors |= results

    def weight(self, name):
        return self.tensors[f"param.{name}"]

    def state(self, what, name):
        return self.tensors[f"optstate.{what}.{name}"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attend(x, x, x)[0]).mean(1))


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(32, 6)


def convolutional():
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers), torch.randn(32, 1, 6, 6)


def attention():
    return Attention(), torch.randint(0, 11, (32, 5))


MODELS = {f.__name__: f for f in (perceptron, convolutional, attention)}


class Workload:
    """A float64 model that gives gradients where its weights are, and takes updated weights."""

    def __init__(self, name, seed=0):
        torch.manual_seed(seed)
        model, self.inputs = MODELS[name]()
        if self.inputs.is_floating_point():
            self.inputs = self.inputs.double()
        self.labels = torch.randint(0, 3, (32,))
        self.model = model.double()
        self.parameters = dict(self.model.named_parameters())

    def gradients(self):
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        found = torch.autograd.grad(loss, list(self.parameters.values()))
        return dict(zip(self.parameters, found, strict=True))

    def weights(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def single(self):
        """Float32 copies of the weights, to make an optimizer for."""
        return {n: nn.Parameter(p.detach().float()) for n, p in self.parameters.items()}

    def take(self, weights):
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
