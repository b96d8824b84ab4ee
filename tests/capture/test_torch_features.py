"""Corners of torch that models lean on: packed sequences, complex numbers, FFTs, integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import infer, options


def trains_as_eager(model: nn.Module, *inputs: torch.Tensor, steps: int = 2) -> None:
    """Compare results and weights after some steps with the same loop in eager torch."""
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.05)
    executor = poptorch.trainingModel(
        model, options(), torch.optim.SGD(model.parameters(), lr=0.05)
    )
    for _ in range(steps):
        out, loss = executor(*inputs)
        expected, expected_loss = eager(*inputs)
        optimizer.zero_grad()
        expected_loss.backward()
        optimizer.step()
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


class Packed(nn.Module):
    """Recurrent layers over sequences of different lengths."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x):
        packed = rnn.pack_padded_sequence(x, [2, 5, 3], batch_first=True, enforce_sorted=False)
        out, _ = self.layer(packed)
        out, lengths = rnn.pad_packed_sequence(out, batch_first=True)
        out = out.sum(1) / lengths[:, None]
        return out, poptorch.identity_loss(out.square(), "sum")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(kind) -> None:
    trains_as_eager(Packed(kind), normal(3, 5, 3))


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


def test_complex_weights_and_ffts() -> None:
    trains_as_eager(Spectral(), normal(3, 8))


def test_complex_inputs_and_results() -> None:
    def forward(z):
        return (
            z.exp() * 1j,
            torch.fft.fft2(z),
            torch.linalg.inv(z + 3 * torch.eye(3)),
            z.real,
            z == z,
        )

    z = torch.complex(normal(3, 3), normal(3, 3, seed=1))
    for got, expected in zip(infer(forward, z), forward(z), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


def test_arithmetic_of_integers_and_bools_is_torchs() -> None:
    def forward(a, b, t):
        return (
            a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a / b, a << 1,
            a & b, ~a, a**2, -a, a > b, t & ~t, t ^ True, t + t, t.sum(), a * t, a.bool() | t,
            torch.where(t, a, b), a.float() // b, a.clamp(-2, 3), (a * 2.5).to(torch.int8),
        )  # fmt: skip

    a = torch.tensor([-7, -1, 0, 5, 7], dtype=torch.int32)
    b = torch.tensor([3, -2, 4, -5, 2], dtype=torch.int32)
    t = torch.tensor([True, False, True, True, False])
    for got, expected in zip(infer(forward, a, b, t), forward(a, b, t), strict=True):
        if expected.dtype == torch.int64:
            expected = expected.int()
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_inputs_that_are_not_contiguous() -> None:
    def forward(x, y):
        return x @ y, x.is_contiguous()

    x, y = normal(6, 4)[::2].t(), normal(1, 5).expand(3, 5)
    got, contiguous = infer(forward, x, y)
    torch.testing.assert_close(got, x @ y)
    assert contiguous
    assert got.is_contiguous()


def test_channels_last_means_values_only() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = normal(2, 3, 6, 6).to(memory_format=torch.channels_last)
    got = infer(conv, x)
    torch.testing.assert_close(got, conv(x).detach())
    assert got.is_contiguous()


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


def test_distributions_in_a_loss() -> None:
    trains_as_eager(Sampling(), normal(4, 3))


class Hooked(nn.Module):
    """Hooks of all kinds: on inputs, on results, on gradients of modules and of tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.first.register_forward_hook(lambda module, args, out: out + args[0])
        self.second.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))

    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        out = self.second(y)
        return out, poptorch.identity_loss(out.square(), "sum")


def test_hooks_are_part_of_the_program() -> None:
    trains_as_eager(Hooked(), normal(4, 3))


class Bounded(nn.Module):
    """Power iteration changes a buffer each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, x):
        out = self.layer(x)
        return out, poptorch.identity_loss(out.square(), "sum")


def test_spectral_norm() -> None:
    trains_as_eager(Bounded(), normal(4, 3))
