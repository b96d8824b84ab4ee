"""``torch.nn.LSTM`` in programs."""

from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options, training, trains_alike


def both_lstms(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an LSTM that starts from given states, and one that does not."""
    x = x if model.first.batch_first else x.transpose(0, 1)
    batch = x.shape[0 if model.first.batch_first else 1]
    state = tuple(each.expand(-1, batch, -1).contiguous() for each in (model.h, model.c[0]))
    outs = []
    for y, (h, c) in (model.first(x, state), model.second(x)):
        outs += [(y * y).sum(), h.exp().sum(), (c * c).sum()]
    return y, poptorch.identity_loss(torch.stack(outs), reduction="sum")


def two_lstms(**settings: Any) -> Having:
    """Return a model of two LSTMs; the states of the first are a parameter and a constant."""
    torch.manual_seed(0)
    first, second = (nn.LSTM(3, 4, **settings) for _ in range(2))
    h, c = torch.randn(2, first.num_layers * (1 + first.bidirectional), 1, 4)
    return Having(both_lstms, first=first, second=second, h=nn.Parameter(h * 1), c=[c])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, accumulation",
    [
        ({}, 1),
        ({"num_layers": 2, "bidirectional": True}, 1),
        ({"batch_first": True}, 4),
    ],
)
def test_values_and_gradients_of_an_lstm_are_those_of_torch(
    settings: dict[str, Any], accumulation: int
) -> None:
    trains_alike(two_lstms(**settings), torch.randn(8, 5, 3), accumulation=accumulation, lr=0.001)


def one_lstm(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an LSTM; the loss is the sum of squares."""
    y, _ = model.layer(x)
    return y, poptorch.identity_loss(y.square().sum(), reduction="sum")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("settings", [{"bias": False}, {"proj_size": 2}, {"dtype": torch.float64}])
def test_an_lstm_that_poptorch_does_not_compute_itself_is_left_to_torch(
    settings: dict[str, Any],
) -> None:
    opts = options()
    opts.Precision.narrow64Bit(False)
    model = Having(one_lstm, layer=nn.LSTM(3, 4, batch_first=True, **settings))
    x = torch.randn(4, 2, 3, dtype=settings.get("dtype"))

    trains_alike(model, x, opts=opts, accumulation=2, lr=0.01)


@pytest.mark.slow
def test_dropout_between_layers_draws_the_same_numbers_side_by_side() -> None:
    def losses(lanes: int) -> torch.Tensor:
        opts = options(accumulation=2).outputMode(poptorch.OutputMode.All).randomSeed(1)
        torch.manual_seed(0)
        layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
        executor = training(Having(one_lstm, layer=layer), opts.lanes(lanes), lr=0.001)
        return torch.stack([executor(torch.ones(8, 1, 3))[1] for _ in range(2)])

    torch.testing.assert_close(losses(lanes=1), losses(lanes=0))
