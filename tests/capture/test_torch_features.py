"""Corners of torch that models lean on: packed sequences, complex numbers, FFTs, integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import agrees, infer, options, trains_alike


class Packed(nn.Module):
    """Recurrent layers over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            kind(3, 4, batch_first=True, bidirectional=True) for kind in (nn.RNN, nn.GRU, nn.LSTM)
        )

    def forward(self, x):
        packed = rnn.pack_padded_sequence(x, [2, 5, 3], batch_first=True, enforce_sorted=False)
        total = 0
        for layer in self.layers:
            out, lengths = rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
            total = total + out.sum(1) / lengths[:, None]
        return total, poptorch.identity_loss(total.square(), "sum")


class Spectral(nn.Module):
    """A filter in the frequency domain, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_complex(normal(5, 2).contiguous()))
        self.real = nn.Parameter(normal(8))

    def forward(self, x):
        spectrum = torch.fft.rfft(x * self.real) * self.filter.conj()
        out = torch.fft.irfft(spectrum, n=8)
        power = (spectrum.abs().square() + spectrum.angle().cos()).sum()
        return out, poptorch.identity_loss(out.square().sum() + power, "none")


class Sampling(nn.Module):
    """A reparametrised sample and its probability under another distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        given = torch.distributions.Normal(self.mean, x.exp())
        other = torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1)
        divergence = torch.distributions.kl_divergence(given, torch.distributions.Normal(0.0, 1.0))
        loss = divergence.sum() - other.log_prob(given.mean).sum()
        return given.stddev, poptorch.identity_loss(loss, "none")


class Hooked(nn.Module):
    """Hooks of all kinds: on inputs, on results, on gradients of modules and of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.first.register_forward_hook(lambda module, args, out: out + args[0])
        self.second.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))

    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        out = self.second(y)
        return out, poptorch.identity_loss(out.square(), "sum")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, shape",
    [(Packed, (3, 5, 3)), (Spectral, (3, 8)), (Sampling, (4, 3)), (Hooked, (4, 3))],
)
def test_it_trains_as_in_torch(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    trains_alike(model(), normal(*shape), lr=0.05)


def complex_numbers(z):
    inverse = torch.linalg.inv(z + 3 * torch.eye(3))
    return z.exp() * 1j, torch.fft.fft2(z), inverse, z.real, z == z


def integers_and_bools(a, b, t):
    return (
        a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a / b, a << 1,
        a & b, ~a, a**2, -a, a > b, t & ~t, t ^ True, t + t, t.sum().int(), a * t, a.bool() | t,
        torch.where(t, a, b), a.float() // b, a.clamp(-2, 3), (a * 2.5).to(torch.int8),
    )  # fmt: skip


@pytest.mark.parametrize(
    "function, inputs",
    [
        (complex_numbers, (torch.complex(normal(3, 3), normal(3, 3, seed=1)),)),
        (
            integers_and_bools,
            (
                torch.tensor([-7, -1, 0, 5, 7], dtype=torch.int32),
                torch.tensor([3, -2, 4, -5, 2], dtype=torch.int32),
                torch.tensor([True, False, True, True, False]),
            ),
        ),
    ],
)
def test_arithmetic_is_torchs(function, inputs) -> None:
    agrees(function, *inputs)


def test_memory_formats_mean_values_only() -> None:
    x, y = normal(6, 4)[::2].t(), normal(1, 5).expand(3, 5)
    got, contiguous = infer(lambda x, y: (x @ y, x.is_contiguous()), x, y)
    torch.testing.assert_close(got, x @ y)
    assert contiguous
    assert got.is_contiguous()
    images = normal(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert agrees(nn.Conv2d(3, 4, 3), images).is_contiguous()


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        out = self.norm(x * self.weight)
        return out, poptorch.identity_loss((out + x).square().sum(), "none")


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("norm, shape", [
    (nn.BatchNorm1d(3, momentum=None), (3,)),
    (nn.BatchNorm2d(3, momentum=None, affine=False), (3, 2, 2)),
    (nn.BatchNorm3d(3, momentum=None), (3, 2, 2, 2)),
])  # fmt: skip
def test_without_momentum_every_batch_has_the_same_share(norm, shape, accumulation) -> None:
    model, x = Normed(copy.deepcopy(norm)), normal(4 * accumulation, *shape)
    trains_alike(model, x, accumulation=accumulation, steps=3, lr=0.01)
    assert model.norm.num_batches_tracked == 3 * accumulation
    assert "forward" not in vars(model.norm)
    agrees(model.eval(), x)  # in evaluation the averages are used


class Product(nn.Module):
    """One of the products of torch, with a weight in single precision."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "linear":
            return self.layer(x)
        return x @ (self.layer.weight[0] if self.kind == "mv" else self.layer.weight)


@pytest.mark.parametrize("kind", ["linear", "mm", "mv"])
@pytest.mark.parametrize("price", [False, True])
def test_operands_of_different_types_are_named_with_the_line(kind: str, price: bool) -> None:
    """Eager torch refuses them, too."""
    model, x = Product(kind).eval(), torch.ones(3, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        model(x)
    wrapped = poptorch.inferenceModel(model, options())
    with pytest.raises(poptorch.Error, match="A product needs operands of one type") as caught:
        wrapped.estimate(x) if price else wrapped(x)
    said = str(caught.value)
    assert "torch.int32" in said
    assert "torch.float32" in said
    assert "test_torch_features.py" in said
    torch.testing.assert_close(wrapped(x.float()), model(x.float()))
