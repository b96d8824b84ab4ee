"""The LSTM operator is ``torch.lstm``: alone, traced, and as lanes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import poptorch
from poptorch._ops.traceable import lstm, lstm_layer


class _Ours(TorchFunctionMode):
    """Counts the LSTMs that become operators."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.lstm:
            result = lstm(*args)
            if result is not NotImplemented:
                self.count += 1
                return result
        return func(*args, **(kwargs or {}))


def values(module: torch.nn.LSTM, x: torch.Tensor, state=None) -> list[torch.Tensor]:
    """Outputs, final states and all gradients."""
    torch.manual_seed(1)  # dropout between the layers
    y, (h, c) = module(x, state)
    loss = (y * y).sum() + h.exp().sum() + (c * c).sum()
    return [y, h, c, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 2, "batch_first": True},
        {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
    ],
)
def test_values_and_gradients_are_those_of_torch(settings: dict[str, object]) -> None:
    module = torch.nn.LSTM(3, 4, **settings)
    x = torch.randn(5, 6, 3, requires_grad=True)
    layers = module.num_layers * (1 + module.bidirectional)
    batch = 5 if module.batch_first else 6
    state = (torch.randn(layers, batch, 4), torch.randn(layers, batch, 4))
    for given in (None, state):
        expected = values(module, x, given)
        with _Ours() as ours:
            found = values(module, x, given)
        assert ours.count == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("settings", [{"bias": False}, {"proj_size": 2}, {"dtype": torch.float64}])
def test_left_to_torch(settings: dict[str, object]) -> None:
    module = torch.nn.LSTM(3, 4, **settings)
    with _Ours() as ours:
        module(torch.randn(5, 2, 3, dtype=settings.get("dtype")))
    assert ours.count == 0


def test_traced_shapes_are_the_real_ones() -> None:
    module, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        with _Ours():
            return values(module, x.detach().requires_grad_())

    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    (node,) = traced.graph.find_nodes(op="call_function", target=lstm_layer)
    real = lstm_layer(
        *[torch.empty_like(a.meta["val"], device="cpu") for a in node.args[:7]], *node.args[7:]
    )
    assert [t.shape for t in node.meta["val"]] == [t.shape for t in real]
    torch.testing.assert_close(traced(x), values(module, x.requires_grad_()))


def test_lanes_are_rows_of_the_batch() -> None:
    module, x = torch.nn.LSTM(3, 4), torch.randn(3, 5, 2, 3)
    weights = dict(module.named_parameters())

    def one(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x,))[0]

    with _Ours():
        shared = torch.func.vmap(one, in_dims=(0, None))(x, weights)
        own = torch.func.vmap(one)(x, {k: torch.stack([v] * 3) for k, v in weights.items()})
    expected = torch.stack([module(lane)[0] for lane in x])
    torch.testing.assert_close(shared, expected)
    torch.testing.assert_close(own, expected)


def test_accumulation_trains_as_the_loop_does() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(3, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.rnn(x.transpose(0, 1))[0]
            return y, poptorch.identity_loss(y * y, reduction="mean")

    x = torch.randn(8, 5, 3)
    losses = []
    for lanes in (1, 0):
        torch.manual_seed(0)
        model = Model()
        options = poptorch.Options().backend("reference").lanes(lanes)
        options.showCompilationProgressBar(False)
        options.Training.gradientAccumulation(4)
        options.outputMode(poptorch.OutputMode.All)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
        training = poptorch.trainingModel(model, options, optimizer)
        losses.append(torch.stack([training(x)[1] for _ in range(3)]))
    torch.testing.assert_close(*losses)
