"""What models are made of: structures, shapes, draws and torch's own features."""

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import poptorch
from helpers.cases import long, together
from helpers.closeness import near
from helpers.eager_loop import Eager, Setup, follow, wrapped
from helpers.wrapping import Calling, Having, agrees, infer, normal, options, training, trains_alike
from poptorch._session.random import first_state


def packed(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = rnn.pack_padded_sequence(x, [2, 3, 1], batch_first=True, enforce_sorted=False)
    outs = []
    for layer in model.layers:
        out, lengths = rnn.pad_packed_sequence(layer(sequences)[0], batch_first=True)
        outs.append(out.sum(1) / lengths[:, None])
    out = torch.cat(outs, 1)
    return out, poptorch.identity_loss(out.square(), "sum")


def filtered(model: Having, x: torch.Tensor) -> Any:
    spectrum = torch.fft.rfft(x * model.real) * model.filter.conj()
    out = torch.fft.irfft(spectrum, n=8)
    power = (spectrum.abs().square() + spectrum.angle().cos()).sum()
    return out, poptorch.identity_loss(out.square().sum() + power, "none")


def sampled(model: Having, x: torch.Tensor) -> Any:
    given = torch.distributions.Normal(model.mean, x.exp())
    other = torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1)
    divergence = torch.distributions.kl_divergence(given, torch.distributions.Normal(0.0, 1.0))
    loss = divergence.sum() - other.log_prob(given.mean).sum()
    return given.stddev, poptorch.identity_loss(loss, "none")


MODELS = [
    (packed, (3, 3, 3), {"layers": nn.ModuleList([nn.RNN(3, 4, batch_first=True)])}),
    (
        packed,
        (3, 3, 3),
        {
            "layers": nn.ModuleList(
                [
                    nn.GRU(3, 4, batch_first=True, bidirectional=True),
                    nn.LSTM(3, 4, batch_first=True),
                ]
            )
        },
    ),
    (
        filtered,
        (3, 8),
        {
            "filter": nn.Parameter(torch.view_as_complex(normal(5, 2).contiguous())),
            "real": nn.Parameter(normal(8)),
        },
    ),
    (sampled, (4, 3), {"mean": nn.Parameter(torch.zeros(3))}),
]


@pytest.mark.slow
@pytest.mark.parametrize("function, shape, state", MODELS)
def test_features_of_torch_train_as_in_eager_torch(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    state: dict[str, nn.ModuleList | torch.Tensor],
) -> None:
    trains_alike(Having(function, **state), normal(*shape), lr=0.05)


def test_arithmetic_is_torchs() -> None:
    def complex_numbers(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inverse = torch.linalg.inv(z + 3 * torch.eye(3))
        return z.exp() * 1j, torch.fft.fft2(z), inverse, z.real, z == z

    agrees(complex_numbers, torch.complex(normal(3, 3), normal(3, 3, seed=1)))
    numbers = torch.tensor([[-7, -1, 0, 5, 7], [3, -2, 4, -5, 2]], dtype=torch.int32)
    truths = torch.tensor([True, False, True, True, False])
    agrees(together("integers", "a, b, t"), *numbers, truths)


def test_memory_formats_mean_values_only() -> None:
    x, y = normal(6, 4)[::2].t(), normal(1, 5).expand(3, 5)
    got, contiguous = infer(lambda x, y: (x @ y, x.is_contiguous()), x, y)
    torch.testing.assert_close(got, x @ y)
    assert contiguous
    assert got.is_contiguous()
    images = normal(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert agrees(nn.Conv2d(3, 4, 3), images).is_contiguous()


@pytest.mark.parametrize(
    "product, price",
    [
        (lambda model, x: model.layer(x), True),
        (lambda model, x: x @ model.layer.weight[0], False),
    ],
)
def test_operands_of_different_types_are_named_with_the_line(
    product: Callable[..., Any], price: bool
) -> None:
    """Eager torch refuses them, too."""
    model, x = Having(product, layer=nn.Linear(4, 4)), torch.ones(3, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        model(x)
    wrapped = poptorch.inferenceModel(model, options())
    with pytest.raises(
        poptorch.Error, match="The operands of a matrix product must have the same type"
    ) as caught:
        wrapped.estimate(x) if price else wrapped(x)
    message = str(caught.value)
    assert "torch.int32" in message
    assert "torch.float32" in message
    assert "self.function(self, *args)" in message
    agrees(model, x.float())


def normed(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.norm(x * model.weight)
    return out, poptorch.identity_loss((out + x).square().sum(), "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm, shape",
    [
        (nn.BatchNorm1d(3, momentum=None), (3,)),
        (nn.BatchNorm2d(3, momentum=None, affine=False), (3, 2, 2)),
    ],
)
def test_without_momentum_every_batch_has_the_same_share(
    norm: nn.Module, shape: tuple[int, ...]
) -> None:
    weight, x = nn.Parameter(torch.tensor(0.5)), normal(12, *shape)
    model = Having(normed, norm=copy.deepcopy(norm), weight=weight)
    trains_alike(model, x, accumulation=3, steps=2, lr=0.01)
    assert model.norm.num_batches_tracked == 6
    assert "forward" not in vars(model.norm)
    agrees(model.eval(), x)  # in evaluation the averages are used


Point = collections.namedtuple("Point", "x y")
LARGE = torch.finfo(torch.float16).max / 2
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]])


@pytest.mark.spec("supported_ops", 16)
def test_single_numbers_get_a_dimension_where_several_are_returned() -> None:
    def call(mode: poptorch.OutputMode = poptorch.OutputMode.Final, **counts: Any) -> torch.Tensor:
        return infer(torch.sum, torch.ones(6), opts=options(**counts).outputMode(mode))

    assert call().shape == ()
    assert call(iterations=3).shape == ()
    assert call(poptorch.OutputMode.All, iterations=3).tolist() == [2, 2, 2]
    assert call(replicas=2).tolist() == [3, 3]


@pytest.fixture(scope="module")
def structure() -> Any:
    """Return what a model returns that nests tensors, plain values and containers."""
    return infer(
        lambda x: [Point(x, None), (1, "text", [2.5]), {"a": {"b": x * 2}, "none": None}],
        torch.ones(2),
    )


@pytest.mark.spec("supported_ops", 17)
def test_structures_of_results_keep_their_kinds(structure: Any) -> None:
    point, plain, by_name = structure

    kinds = [type(each) for each in (structure, point, plain, by_name)]
    assert kinds == [list, Point, tuple, dict]


@pytest.mark.spec("supported_ops", 17)
def test_plain_values_among_results_are_returned_as_they_are(structure: Any) -> None:
    point, plain, by_name = structure

    assert plain == (1, "text", [2.5])
    assert point.y is None
    assert by_name["none"] is None


@pytest.mark.spec("supported_ops", 17)
def test_tensors_are_computed_wherever_they_are_in_a_structure(structure: Any) -> None:
    point, _, by_name = structure

    assert point.x.tolist() == [1, 1]
    assert by_name["a"]["b"].tolist() == [2, 2]


@pytest.mark.spec("supported_ops", 22, 23, 24)
def test_gelus_softmax_of_large_numbers_and_lstms_are_torchs() -> None:
    x = torch.linspace(-4, 4, 99)
    exact, near = agrees(lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")), x, rtol=0, atol=0)
    assert 1e-5 < (exact - near).abs().max() < 1e-3
    agrees(lambda x: (F.softmax(x, 0), F.softmax(x, -1)), (SIGNS * LARGE).half())
    got = agrees(nn.LSTM(3, 4, batch_first=True), normal(2, 5, 3))
    assert type(got) is tuple
    assert type(got[1]) is tuple


@pytest.mark.spec("supported_ops", 25)
def test_a_model_without_inputs_runs_in_each_call() -> None:
    alone = Having(lambda model: model.count.add_(2) * 1, count=torch.zeros(1))
    model = poptorch.inferenceModel(alone, options())

    counts = [model().item() for _ in range(3)]

    assert counts == [2, 4, 6]


@pytest.mark.spec("supported_ops", 25)
def test_a_model_without_outputs_returns_none() -> None:
    assert infer(lambda x: None, torch.ones(1)) is None


@pytest.mark.spec("supported_ops", 25)
def test_a_model_without_parameters_computes() -> None:
    assert infer(lambda x: x + 1, torch.ones(1)) == 2


@pytest.mark.spec("supported_ops", 25)
def test_a_model_without_inputs_is_trained() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    lonely = Having(lambda m: poptorch.identity_loss(m.weight.square(), "none"), weight=weight)

    loss = training(lonely, lr=0.1)()

    assert loss == 9
    assert lonely.weight == 3 - 0.1 * 6


@pytest.mark.spec("precision", 17)
@pytest.mark.spec("supported_ops", 26, 27)
def test_inputs_have_a_position_or_a_name_and_unused_ones_are_still_checked() -> None:
    layer, x = nn.Linear(3, 2), normal(4, 3)
    model = poptorch.inferenceModel(layer, options())
    for got in (model(x), model(input=x)):
        torch.testing.assert_close(got, layer(x).detach())
    model = poptorch.inferenceModel(Calling(lambda x, unused: x * 2), options().programs(1))
    assert model(torch.ones(2), torch.ones(2, 3)).tolist() == [2, 2]
    for unused, what in ((torch.ones(2, 4), "Shape"), (torch.ones(2, 3, dtype=torch.int), "type")):
        with pytest.raises(poptorch.Error, match=f"{what} mismatch"):
            model(torch.ones(2), unused)


SEED = 5


def draws(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([each.float().flatten() for each in together("draws", "x")(x)])[None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, lanes, replicas, backend",
    [
        (draws, 1, 1, "reference"),
        (draws, 0, 1, "reference"),
        (draws, 4, 2, "reference"),
        (lambda x: torch.poisson(x.exp()), 0, 1, "reference"),  # which lanes cannot draw
        long(draws, 4, 2, "inductor"),
    ],
)
def test_draws_are_the_same_one_after_another_and_side_by_side(
    function: Callable[..., Any], lanes: int, replicas: int, backend: str
) -> None:
    counts = {"iterations": 4, "replicas": replicas, "lanes": lanes}
    setup = Setup(training=False, **counts, backend=backend, seed=SEED)
    make = functools.partial(Calling, function)
    eager = Eager(make, bool, setup, follow(first_state(SEED), 1, replicas))
    x = torch.linspace(-1, 1, setup.rows * 5).reshape(-1, 5)
    with wrapped(make, setup) as ours:
        for _ in range(2):
            torch.testing.assert_close(ours(x), eager(x))
        side_by_side = ours.wrapper.plan().program.lanes is not None
        assert side_by_side == (lanes != 1 and function is draws)


def attention() -> nn.Module:
    """Return self-attention with dropout of its weights and of its output."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        out, _ = m.attention(x, x, x, need_weights=False)
        return F.dropout(out, 0.3, m.training)

    return Having(forward, attention=nn.MultiheadAttention(8, 2, 0.1, batch_first=True))


def encoder() -> nn.Module:
    """Return a whole layer of an encoder, which has dropout in four places."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.slow
@pytest.mark.parametrize("layer, lanes", [(attention, 0), (encoder, 0), (encoder, 1)])
def test_attention_drops_the_same_elements_as_in_eager_torch(
    layer: Callable[[], nn.Module], lanes: int
) -> None:
    """Attention returns samples in the second dimension of memory, so masks have that layout."""

    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = m.layer(x)
        return out, poptorch.identity_loss(out[..., 0].square(), "mean")

    def make() -> Having:
        torch.manual_seed(0)
        return Having(forward, layer=layer())

    setup = Setup(accumulation=2, lanes=lanes, seed=SEED)
    x = torch.linspace(-1, 1, setup.rows * 40).sin().view(-1, 5, 8)
    eager = Eager(make, lambda results: results[1], setup, follow(first_state(SEED), steps=2))
    close = near(300, size=4)
    with wrapped(make, setup) as ours:
        torch.testing.assert_close(ours(x), eager(x), **close)
        torch.testing.assert_close(ours.state(), eager.state(), **close)
