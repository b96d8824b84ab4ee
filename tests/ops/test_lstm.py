"""LSTMs are one operator each, which computes what torch's does: alone, and as lanes."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options, training, trains_alike


def forward(model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By an LSTM that starts from given states, and one that does not."""
    x = x if model.first.batch_first else x.transpose(0, 1)
    batch = x.shape[0 if model.first.batch_first else 1]
    state = tuple(each.expand(-1, batch, -1).contiguous() for each in (model.h, model.c[0]))
    outs = []
    for y, (h, c) in (model.first(x, state), model.second(x)):
        outs += [(y * y).sum(), h.exp().sum(), (c * c).sum()]
    return y, poptorch.identity_loss(torch.stack(outs), reduction="sum")


def both(**settings) -> Having:
    torch.manual_seed(0)
    first, second = (nn.LSTM(3, 4, **settings) for _ in range(2))
    states = torch.randn(2, first.num_layers * (1 + first.bidirectional), 1, 4)
    return Having(forward, first=first, second=second, h=nn.Parameter(states[0] * 1), c=[states[1]])


@pytest.mark.parametrize("settings, accumulation", [
    ({}, 1), ({"num_layers": 2, "bidirectional": True}, 1), ({"batch_first": True}, 4),
])  # fmt: skip
def test_values_and_gradients_are_those_of_torch(settings, accumulation: int) -> None:
    trains_alike(both(**settings), torch.randn(8, 5, 3), accumulation=accumulation, lr=0.001)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("settings", [{"bias": False}, {"proj_size": 2}, {"dtype": torch.float64}])
def test_what_it_cannot_compute_is_left_to_torch(settings) -> None:
    def forward(model, x):
        y, _ = model.layer(x)
        return y, poptorch.identity_loss(y.square().sum(), reduction="sum")

    opts, x = options(), torch.randn(4, 5, 3, dtype=settings.get("dtype"))
    opts.Precision.narrow64Bit(False)
    model = Having(forward, layer=nn.LSTM(3, 4, batch_first=True, **settings))
    trains_alike(model, x, opts=opts, accumulation=2, lr=0.01)


@pytest.mark.slow
def test_dropout_between_layers_is_drawn_alike_side_by_side() -> None:
    def losses(lanes: int) -> torch.Tensor:
        opts = options(accumulation=2).outputMode(poptorch.OutputMode.All).randomSeed(1)
        model = training(both(num_layers=2, dropout=0.5), opts.lanes(lanes), lr=0.001)
        return torch.stack([model(torch.ones(8, 2, 3))[1] for _ in range(2)])

    torch.testing.assert_close(losses(1), losses(0))
