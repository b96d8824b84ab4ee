"""What a micro-batch draws does not depend on what runs beside it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.beside import Eager, Way, follow, wrapped
from helpers.cases import long
from helpers.closeness import near
from helpers.wrapping import Calling, Having
from poptorch._session.random import first_state

SEED = 5


def draws(x):
    drawn = (
        F.dropout(x, 0.5), torch.bernoulli(x.sigmoid()), torch.rand(3), torch.rand_like(x.t()),
        x.new_empty(4).uniform_(-1, 1), torch.randn(17), torch.randn_like(x),
        x.new_empty(2, 3).normal_(1, 2), torch.randint(9, (3,)), torch.randint(-9, 9, (3,)),
        torch.randint_like(x, 9), torch.randint_like(x, -9, 9), x.new_empty(3).exponential_(2),
        F.dropout(x.t(), 0.3), F.dropout(x.view(2, 2, 5).permute(2, 0, 1)),
        torch.bernoulli(x.t().sigmoid()),
    )  # fmt: skip
    return torch.cat([each.float().flatten() for each in drawn])[None]


@pytest.mark.parametrize("function, lanes, replicas, backend", [
    (draws, 1, 1, "reference"), (draws, 0, 1, "reference"), (draws, 4, 2, "reference"),
    (lambda x: torch.poisson(x.exp()), 0, 1, "reference"),  # which lanes cannot draw
    long(draws, 4, 2, "inductor"),
])  # fmt: skip
def test_draws_are_alike_one_after_another_and_side_by_side(function, lanes, replicas, backend):
    counts = {"iterations": 4, "replicas": replicas, "lanes": lanes}
    way = Way(training=False, **counts, backend=backend, seed=SEED)
    make = functools.partial(Calling, function)
    eager = Eager(make, bool, way, follow(first_state(SEED), 1, replicas))
    x = torch.linspace(-1, 1, way.rows * 5).reshape(-1, 5)
    with wrapped(make, way) as ours:
        for _ in range(2):
            torch.testing.assert_close(ours(x), eager(x))
        side_by_side = ours.wrapper.plan().program.lanes is not None
        assert side_by_side == (lanes != 1 and function is draws)


@pytest.mark.parametrize("lanes", [0, 1])
def test_an_encoder_drops_out_what_it_does_in_eager_torch(lanes: int) -> None:
    """Its attention returns samples in the second dimension of memory, as masks then lie."""

    def forward(m, x):
        out = m.layer(x)
        return out, poptorch.identity_loss(out[..., 0].square(), "mean")

    def make():
        torch.manual_seed(0)
        return Having(forward, layer=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))

    way = Way(accumulation=2, lanes=lanes, seed=SEED)
    x = torch.linspace(-1, 1, way.rows * 40).sin().view(-1, 5, 8)
    eager = Eager(make, lambda results: results[1], way, follow(first_state(SEED), steps=2))
    close = near(300, size=4)
    with wrapped(make, way) as ours:
        torch.testing.assert_close(ours(x), eager(x), **close)
        torch.testing.assert_close(ours.state(), eager.state(), **close)
