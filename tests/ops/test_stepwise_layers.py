"""``torch.nn.GRU`` and ``torch.nn.RNN`` as one operator, for any number of steps."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import EagerPair, Having, compilations, options
from poptorch._ops.recurrent_layers import stepwise

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "layers in both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, without biases": {"batch_first": True, "bias": False},
    "64 bits": {"dtype": torch.float64},
}


class Layer:
    """A layer of torch and the same layer as one operator, with the same inputs."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        cls, more = LAYERS[kind]
        self.kind, self.layer = kind, cls(3, 4, **settings, **more)
        dtype = settings.get("dtype")
        directions = self.layer.num_layers * (1 + self.layer.bidirectional)
        self.x = torch.randn(5, 6, 3, dtype=dtype, requires_grad=True)
        rows = 5 if self.layer.batch_first else 6
        self.start = torch.randn(directions, rows, 4, dtype=dtype, requires_grad=True)

    def of_torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        y, last = self.layer(self.x, self.start)
        return y, last

    def as_operator(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        y, last = stepwise(
            self.kind, self.x, self.start, layer._flat_weights, layer.bias, layer.num_layers,
            0.0, True, layer.bidirectional, layer.batch_first,
        )  # fmt: skip
        return y, last

    def gradients(self, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y, last = results
        loss = y.square().sum() + last.exp().sum()
        return torch.autograd.grad(loss, [self.x, self.start, *self.layer.parameters()])


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Layer:
    return Layer(request.param, settings)


def test_values_in_training_are_those_of_torch(layer: Layer) -> None:
    torch.testing.assert_close(layer.as_operator(), layer.of_torch())


@torch.no_grad()
def test_values_in_inference_are_those_of_torch(layer: Layer) -> None:
    torch.testing.assert_close(layer.as_operator(), layer.of_torch())


def test_gradients_are_those_of_torch(layer: Layer) -> None:
    expected = layer.gradients(layer.of_torch())
    torch.testing.assert_close(layer.gradients(layer.as_operator()), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_result_that_nobody_reads_has_no_gradient(kind: str) -> None:
    layer = Layer(kind, {})
    (expected,) = torch.autograd.grad(layer.of_torch()[1].sum(), layer.x)
    (found,) = torch.autograd.grad(layer.as_operator()[1].sum(), layer.x)
    torch.testing.assert_close(found, expected)


def test_an_input_without_a_batch_is_left_to_torch() -> None:
    layer = Layer("gru", {})
    without_batch = layer.x[:, 0]
    given = (layer.start[:, 0], layer.layer._flat_weights, True, 1, 0.0, True, False, False)
    assert stepwise("gru", without_batch, *given) is NotImplemented


def with_loss(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, last = model.layer(x)
    return y, poptorch.identity_loss(y.square().mean() + last.exp().mean(), reduction="mean")


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_micro_batches_and_replicas_of_all_lengths_train_as_in_eager_pytorch(kind: str) -> None:
    cls, more = LAYERS[kind]
    model = Having(with_loss, layer=cls(3, 4, num_layers=2, batch_first=True, **more))
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, eager))
    opts = options(accumulation=2, replicas=2, iterations=2).programs(4)
    executor = poptorch.trainingModel(model, opts, ours)

    with compilations() as compiled:
        for length in (5, 9, 12, 7):
            x = torch.randn(16, length, 3)
            executor(x)
            for rows in x.chunk(2):  # of each iteration
                theirs.zero_grad()
                eager(rows)[1].backward()
                theirs.step()

    assert len(compiled) == 2
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_layers_without_biases_train_at_all_lengths(cls: type[nn.RNNBase]) -> None:
    layer = cls(3, 4, bias=False, batch_first=True)
    model = Having(
        lambda m, x: F.mse_loss(m.layer(x)[0].mean(1), x[:, 0, :1].expand(-1, 4)), layer=layer
    )
    close = {"rtol": 1.3e-6, "atol": 1e-5}
    pair = EagerPair(model, lambda p: torch.optim.SGD(p, lr=0.5), options().programs(4), **close)

    for length in (5, 9, 12, 7):
        pair.step(torch.randn(4, length, 3))

    pair.compare()
    assert pair.wrapped._session.sizes.reasons == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [((2, 5, 3), (4, 9, 3), (3, 7, 3)), ((2, 5, 3), (4, 5, 3), (3, 5, 3))],
    ids=["with lengths", "alone"],
)
def test_numbers_of_rows_vary(shapes: tuple[tuple[int, ...], ...]) -> None:
    layer = nn.GRU(3, 4, batch_first=True).eval()
    expected = copy.deepcopy(layer)
    executor = poptorch.inferenceModel(layer, options().programs(4))
    with compilations() as compiled, torch.no_grad():
        for shape in shapes:
            x = torch.randn(*shape)
            torch.testing.assert_close(executor(x), expected(x))
    assert len(compiled) == 2
