"""Corners of torch that models lean on: packed sequences, complex numbers, FFTs, integers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import Having, agrees, infer, options, trains_alike


def packed(model, x):
    sequences = rnn.pack_padded_sequence(x, [2, 3, 1], batch_first=True, enforce_sorted=False)
    outs = []
    for layer in model.layers:
        out, lengths = rnn.pad_packed_sequence(layer(sequences)[0], batch_first=True)
        outs.append(out.sum(1) / lengths[:, None])
    out = torch.cat(outs, 1)
    return out, poptorch.identity_loss(out.square(), "sum")


def filtered(model, x):
    spectrum = torch.fft.rfft(x * model.real) * model.filter.conj()
    out = torch.fft.irfft(spectrum, n=8)
    power = (spectrum.abs().square() + spectrum.angle().cos()).sum()
    return out, poptorch.identity_loss(out.square().sum() + power, "none")


def sampled(model, x):
    given = torch.distributions.Normal(model.mean, x.exp())
    other = torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1)
    divergence = torch.distributions.kl_divergence(given, torch.distributions.Normal(0.0, 1.0))
    loss = divergence.sum() - other.log_prob(given.mean).sum()
    return given.stddev, poptorch.identity_loss(loss, "none")


RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
MODELS = [
    (packed, (3, 3, 3), {"layers": nn.ModuleList(
        kind(3, 4, batch_first=True, bidirectional=kind is nn.GRU) for kind in RECURRENT)}),
    (filtered, (3, 8), {"filter": nn.Parameter(torch.view_as_complex(normal(5, 2).contiguous())),
                        "real": nn.Parameter(normal(8))}),
    (sampled, (4, 3), {"mean": nn.Parameter(torch.zeros(3))}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("function, shape, state", MODELS)
def test_it_trains_as_in_torch(function, shape: tuple[int, ...], state) -> None:
    trains_alike(Having(function, **state), normal(*shape), lr=0.05)


def integers_and_bools(a, b, t):
    return (
        a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a / b, a << 1,
        a & b, ~a, a**2, -a, a > b, t & ~t, t ^ True, t + t, t.sum().int(), a * t, a.bool() | t,
        torch.where(t, a, b), a.float() // b, a.clamp(-2, 3), (a * 2.5).to(torch.int8),
    )  # fmt: skip


def test_arithmetic_is_torchs() -> None:
    def complex_numbers(z):
        inverse = torch.linalg.inv(z + 3 * torch.eye(3))
        return z.exp() * 1j, torch.fft.fft2(z), inverse, z.real, z == z

    agrees(complex_numbers, torch.complex(normal(3, 3), normal(3, 3, seed=1)))
    numbers = torch.tensor([[-7, -1, 0, 5, 7], [3, -2, 4, -5, 2]], dtype=torch.int32)
    agrees(integers_and_bools, *numbers, torch.tensor([True, False, True, True, False]))


def test_memory_formats_mean_values_only() -> None:
    x, y = normal(6, 4)[::2].t(), normal(1, 5).expand(3, 5)
    got, contiguous = infer(lambda x, y: (x @ y, x.is_contiguous()), x, y)
    torch.testing.assert_close(got, x @ y)
    assert contiguous
    assert got.is_contiguous()
    images = normal(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert agrees(nn.Conv2d(3, 4, 3), images).is_contiguous()


@pytest.mark.parametrize("product, price", [
    (lambda model, x: model.layer(x), True), (lambda model, x: x @ model.layer.weight[0], False),
])  # fmt: skip
def test_operands_of_different_types_are_named_with_the_line(product, price: bool) -> None:
    """Eager torch refuses them, too."""
    model, x = Having(product, layer=nn.Linear(4, 4)), torch.ones(3, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        model(x)
    wrapped = poptorch.inferenceModel(model, options())
    with pytest.raises(poptorch.Error, match="A product needs operands of one type") as caught:
        wrapped.estimate(x) if price else wrapped(x)
    said = str(caught.value)
    assert "torch.int32" in said
    assert "torch.float32" in said
    assert "self.function(self, *args)" in said
    agrees(model, x.float())


def normed(model, x):
    out = model.norm(x * model.weight)
    return out, poptorch.identity_loss((out + x).square().sum(), "none")


@pytest.mark.parametrize("norm, shape", [
    (nn.BatchNorm1d(3, momentum=None), (3,)),
    (nn.BatchNorm2d(3, momentum=None, affine=False), (3, 2, 2)),
])  # fmt: skip
def test_without_momentum_every_batch_has_the_same_share(norm, shape) -> None:
    weight, x = nn.Parameter(torch.tensor(0.5)), normal(12, *shape)
    model = Having(normed, norm=copy.deepcopy(norm), weight=weight)
    trains_alike(model, x, accumulation=3, steps=2, lr=0.01)
    assert model.norm.num_batches_tracked == 6
    assert "forward" not in vars(model.norm)
    agrees(model.eval(), x)  # in evaluation the averages are used
