"""Mixed number formats: what layers, operators and losses do with them, as in eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch
from helpers.cases import expressions
from helpers.closeness import FUNCTION, near, relative
from helpers.wrapping import (
    EagerPair,
    Graded,
    Having,
    agrees,
    graph_of,
    infer,
    normal,
    options,
    training,
)

HALF, FLOAT, BOOL = torch.float16, torch.float32, torch.bool
CASTING = poptorch.HalfFloatCastingBehavior
CHOICES = {HALF: CASTING.FloatDowncastToHalf, FLOAT: CASTING.HalfUpcastToFloat}


def choosing(dtype: torch.dtype) -> poptorch.Options:
    opts = options()
    if dtype is not None:
        opts.Precision.halfFloatCasting(CHOICES[dtype])
    return opts


def dtypes(results: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> list[torch.dtype]:
    return [result.dtype for result in results]


def classifier(layer: nn.Linear) -> Graded:
    return Graded(F.cross_entropy, both=True, layer=layer, flat=nn.Flatten())


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (6, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2, padding=1, padding_mode="circular"), (6, 3, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 2), (6, 3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (6, 4)),
    "layer norm": (lambda: nn.LayerNorm(3), (6, 3)),
    "prelu": (lambda: nn.PReLU(3), (6, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, 1e-5, 0.1, True, True), (6, 3, 5)),
    "bilinear": (lambda: nn.Bilinear(3, 3, 4), (6, 3)),
    "gru": (lambda: nn.GRU(3, 4), (2, 2, 3)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 4, 8)),
    "lstm": (lambda: nn.LSTM(3, 4, bidirectional=True), (2, 2, 3)),
    "rnn": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (2, 2, 3)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (2, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (2, 3)),
}


def called(layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Call a layer of any kind. The states of cells are float32, regardless of the input."""
    kind, state = type(layer).__name__, torch.ones(2, 4)
    rest = {
        "Bilinear": (x,),
        "MultiheadAttention": (x, x),
        "LSTMCell": ((state, state),),
        "GRUCell": (state,),
    }
    result = layer(x, *rest.get(kind, ()))
    return result[0] if isinstance(result, tuple) else result


def together(model: Having, *inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    outs = [called(layer, x) for layer, x in zip(model.layers, inputs, strict=True)]
    losses = torch.stack([(out.float() + 1).square().mean() for out in outs])
    return outs, poptorch.identity_loss(losses, "sum")


FEW = ["linear", "batch norm", "conv2d", "lstm cell"]


class Mixed(NamedTuple):
    """A model of layers whose weights and inputs have different types, after one call."""

    kind: torch.dtype
    """The type that its results should have."""
    weights: torch.dtype
    trained: bool
    names: list[str]
    outs: list[torch.Tensor]
    loss: torch.Tensor
    exact: list[torch.Tensor]
    exact_loss: torch.Tensor
    before: list[torch.Tensor]
    layers: nn.ModuleList


@pytest.fixture(
    scope="module",
    params=[
        (HALF, FLOAT, None, FEW),
        (HALF, FLOAT, None, [*LAYERS]),
        (FLOAT, HALF, None, [*LAYERS]),
        (HALF, FLOAT, FLOAT, [*LAYERS, "rms norm"]),
        (FLOAT, HALF, HALF, [*LAYERS, "rms norm"]),
    ],
    ids=[
        "half inputs, few layers",
        "half inputs",
        "half weights",
        "half inputs, float chosen",
        "half weights and chosen",
    ],
)
def mixed(request: pytest.FixtureRequest) -> Mixed:
    """Return what came of a model with an activation type, a weight type, and a choice or none.

    Without a choice it is trained, also two micro-batches side by side.
    """
    activation, weights, choice, names = request.param
    kind, lanes = choice or activation, 2 if (choice, weights) == (None, FLOAT) else 1
    made = LAYERS | {"rms norm": (lambda: nn.RMSNorm(3), (6, 3))}
    table = {name: made[name] for name in names}
    torch.manual_seed(0)
    layers = nn.ModuleList([make() for make, _ in table.values()])
    inputs = [torch.randn(*shape).to(activation) for _, shape in table.values()]
    model = Having(together, layers=layers)
    exact, exact_loss = model(*(x.to(kind).float() for x in inputs))
    model.to(weights)
    before, opts = [p.detach().clone() for p in model.parameters()], choosing(choice)
    opts.Training.gradientAccumulation(lanes)
    wrapped = poptorch.inferenceModel(model, opts) if choice else training(model, opts, lr=1.0)
    outs, loss = wrapped(*(torch.cat([x] * lanes) for x in inputs))
    wrapped.copyWeightsToHost()
    return Mixed(
        kind, weights, choice is None, names, outs, loss, exact, exact_loss, before, layers
    )


ROUNDED = near(4, dtype=HALF)


@pytest.mark.slow
@pytest.mark.spec("precision", 2, 3)
def test_results_of_layers_have_the_type_of_the_inputs_or_what_was_chosen(mixed: Mixed) -> None:
    types = {name: out.dtype for name, out in zip(mixed.names, mixed.outs, strict=True)}

    assert types == dict.fromkeys(mixed.names, mixed.kind)


@pytest.mark.slow
@pytest.mark.spec("precision", 2, 3)
def test_layers_with_weights_of_another_type_compute_what_float_ones_do(mixed: Mixed) -> None:
    for name, result, want in zip(mixed.names, mixed.outs, mixed.exact, strict=True):
        torch.testing.assert_close(result.float(), want.detach(), msg=name, **ROUNDED)
    torch.testing.assert_close(mixed.loss, mixed.exact_loss.detach(), **ROUNDED)


@pytest.mark.slow
@pytest.mark.spec("precision", 2, 3)
def test_weights_keep_their_type_and_are_trained(mixed: Mixed) -> None:
    after = [*mixed.layers.parameters()]

    assert {weight.dtype for weight in after} == {mixed.weights}
    changed = [bool((old != new).any()) for old, new in zip(mixed.before, after, strict=True)]
    assert set(changed) == {mixed.trained}


@pytest.mark.slow
@pytest.mark.spec("precision", 2, 3)
def test_no_layer_keeps_what_casting_replaced(mixed: Mixed) -> None:
    assert not any("check_input" in vars(layer) for layer in mixed.layers)


@pytest.mark.spec("precision", 2)
def test_half_activations_train_float_weights() -> None:
    """The update happens in float32: a change that half could not hold is not lost."""
    model = classifier(nn.Linear(3, 4))
    nn.init.ones_(model.layer.weight)
    exact = copy.deepcopy(model)
    plain = torch.optim.SGD(exact.parameters(), lr=1e-5)
    wrapped = training(model, options(accumulation=4), lr=1e-5)
    x, labels = torch.randn(8, 3).half(), torch.arange(8) % 4
    for _ in range(2):
        assert dtypes(wrapped(x, labels)) == [HALF, HALF]
        plain.zero_grad()
        exact(x.float(), labels)[1].backward()
        plain.step()
    change = (model.layer.weight.detach() - 1).abs().max()
    assert 0 < float(change) < 2.0**-11  # half a step of float16 at 1
    torch.testing.assert_close(model.state_dict(), exact.state_dict(), rtol=0, atol=relative(2))


INDEX, LABELS = torch.tensor([2, 0, 1, 3]), torch.arange(4)
ROWS_OF = INDEX[:, None].expand(4, 4).contiguous()
PROMOTING, REFUSING = (expressions(k, "a, h", **globals()) for k in ("promoting", "refusing"))
MIXED = PROMOTING | REFUSING


def mixing(model: Having) -> tuple[list[torch.Tensor], torch.Tensor]:
    pairs = zip(model.names, model.a, model.h, strict=True)
    outs = [MIXED[name](a, h) for name, a, h in pairs]
    return outs, poptorch.identity_loss(sum(out.float().sum() for out in outs), "none")


@pytest.mark.slow
@pytest.mark.spec("precision", 1)
@pytest.mark.parametrize(
    "names", [[*MIXED][::15], [*MIXED]], ids=["every fifteenth function", "all functions"]
)
@pytest.mark.parametrize("trained, chosen", [(True, None), (False, FLOAT)])
def test_mixed_operands_get_one_type(
    trained: bool, chosen: torch.dtype | None, names: list[str]
) -> None:
    """By default half, and float with HalfUpcastToFloat; exactly what eager makes of such."""
    a, h = (t.half().float() for t in (torch.randn(4, 4), torch.randn(4, 4)))
    own = {"a": a, "h": h.half()}
    copies = {n: nn.ParameterList(v.clone() for _ in names) for n, v in own.items()}
    model, opts = Having(mixing, names=names, **copies), choosing(chosen)
    wrapped = training(model, opts, lr=1.0) if trained else poptorch.inferenceModel(model, opts)
    outs, _ = wrapped()
    for name, got, *after in zip(names, outs, model.a, model.h, strict=True):
        kind = FLOAT if chosen and name != "h * a[0, 0]" else HALF
        assert got.dtype == kind, name  # torch's rule: a number does not change a tensor's type
        # Half results are those of float32, rounded: half itself adds up too coarsely to compare.
        leaves = [a.clone(), h.half() if chosen and name in PROMOTING else h.clone()]
        want = MIXED[name](*(leaf.requires_grad_() for leaf in leaves))
        rounded = near(4, size=2, dtype=HALF) if kind == HALF else {}
        torch.testing.assert_close(got.float(), want.detach().float(), msg=name, **rounded)
        gradients = torch.autograd.grad(want.sum(), leaves, allow_unused=True)
        for new, old, gradient in zip(after, (a, h), gradients, strict=True):
            moved = torch.zeros(4, 4) if gradient is None or not trained else gradient.float()
            rounded = near(8, size=8, dtype=HALF)  # weights of up to 8 move by them
            torch.testing.assert_close(old - new.detach().float(), moved, msg=name, **rounded)


def cast(a: torch.Tensor, h: torch.Tensor) -> Any:
    changed = a.half()
    changed.add_(1)
    return changed, a, a.to(HALF), a.float()


RULES = {
    "in place what changes keeps its type": (
        lambda a, h: (
            a.clone().add_(h),
            h.clone().mul_(a),
            a.clone().addmm_(h, h),
            h.clone().addmm_(a, h),
        ),
        [FLOAT, HALF, FLOAT, HALF],
    ),
    "numbers and equal types are left alone": (
        lambda a, h: (h + 1.5, a + a, a @ a, h.float()),
        [HALF, FLOAT, FLOAT, FLOAT],
    ),
    "casts leave their operand alone": (cast, [HALF, FLOAT, HALF, FLOAT]),
    "half and float are compared in float": (
        lambda a, h: (h == a, h < a, h.half() == a.half(), h == 0.5),
        [BOOL] * 4,
    ),
    "comparisons are bool": (
        lambda a, h: (a > 0, a == a, torch.isnan(a), ~(a > 0), (a > 0) & (a < 1)),
        [BOOL] * 5,
    ),
}


@pytest.mark.spec("precision", 5, 18, 19)
@pytest.mark.parametrize("function, kinds", RULES.values(), ids=RULES)
def test_results_have_the_documented_types(
    function: Callable[..., Any], kinds: list[torch.dtype]
) -> None:
    a = torch.randn(4, 4)
    a[0] = torch.tensor([0.1, 0.5, 0.0, -1.0])
    h = a.half()
    got = infer(function, a, h)
    assert dtypes(got) == kinds
    for result, want in zip(got, function(a, h.float()), strict=True):
        torch.testing.assert_close(result.float(), want.float(), **near(2, size=4, dtype=HALF))


WHOLE = torch.arange(4) + 2**20
REAL = torch.linspace(-1, 1, 4, dtype=torch.float64)


def with_64_bits(whole: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return whole, real, real.argmax(), torch.tensor(5)


@pytest.fixture
def narrowing_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what asks for the lines about types without support, of a new process."""
    from poptorch._capture import micro_batch

    micro_batch.report_narrowed.cache_clear()
    caplog.set_level("INFO", logger="poptorch::python")
    return lambda: [text for text in caplog.messages if "not supported natively" in text]


@pytest.mark.spec("executor", 23)
@pytest.mark.spec("precision", 4)
def test_64_bit_types_come_back_as_32_bit() -> None:
    results = infer(with_64_bits, WHOLE, REAL)

    assert dtypes(results) == [torch.int32, FLOAT, torch.int32, torch.int32]
    assert torch.equal(results[0].long(), WHOLE)
    assert torch.equal(results[1], REAL.float())


@pytest.mark.spec("executor", 23)
@pytest.mark.spec("precision", 4)
def test_one_line_for_each_64_bit_type_says_that_it_is_narrowed(
    narrowing_lines: Callable[[], list[str]],
) -> None:
    for _ in range(2):
        infer(with_64_bits, WHOLE, REAL)

    of_floats, of_integers = narrowing_lines()
    assert "torch.float64" in of_floats
    assert "torch.int64" in of_integers


def test_nothing_is_said_about_labels_of_64_bits(narrowing_lines: Callable[[], list[str]]) -> None:
    infer(lambda x, y: x[y], torch.randn(4, 3), torch.arange(4))

    assert narrowing_lines() == []


@pytest.mark.spec("precision", 4)
def test_64_bit_types_are_kept_if_the_user_says_so() -> None:
    wide = options()
    wide.Precision.narrow64Bit(False)

    agrees(lambda i, x: (i, x), WHOLE, REAL, opts=wide)


@pytest.mark.spec("precision", 4)
def test_a_model_in_double_is_trained_in_float_and_stays_in_double() -> None:
    model = classifier(nn.Linear(3, 4).double())
    before = model.layer.weight.detach().clone()

    training(model)(torch.randn(8, 3).double(), torch.arange(8) % 4)

    after = model.state_dict()["layer.weight"]
    assert after.dtype == torch.float64
    assert not torch.equal(after, before)
    assert torch.equal(after.float().double(), after)


KINDS = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


@pytest.mark.spec("precision", 6)
@pytest.mark.parametrize("s", KINDS)
def test_sums_with_every_type_in_every_type(s: torch.dtype) -> None:
    a, b = torch.tensor([1.5, -2.25, 100.0]), torch.tensor([0.5, 4.75, -7.0])

    def sums(a: torch.Tensor, b: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        added = [(t, a.to(s) + b.to(t)) for t in KINDS]
        return [(total.type(t), total.type(s)) for t, total in added]

    narrow = {torch.float64: torch.float32, torch.int64: torch.int32}
    for both, wanted in zip(infer(sums, a, b), sums(a, b), strict=True):
        for got, want in zip(both, wanted, strict=True):
            assert got.dtype == narrow.get(want.dtype, want.dtype)
            torch.testing.assert_close(got.double(), want.double(), **near(1, size=0, dtype=HALF))


@pytest.mark.spec("precision", 7)
def test_factories_take_the_type_of_their_input() -> None:
    def made(x: torch.Tensor) -> list[torch.Tensor]:
        like = [torch.ones(3, dtype=x.dtype), torch.full((2,), 0.1, dtype=x.dtype)]
        like += [torch.zeros_like(x), x.new_ones(2), torch.rand(2, dtype=x.dtype)]
        return [*like, torch.empty_like(x).normal_(), torch.normal(x, 1.0), x.dtype == HALF]

    *tensors, known = infer(made, torch.randn(4).half())
    assert dtypes(tensors) == [HALF] * 7
    assert known is True
    assert float(tensors[1][0]) == float(torch.tensor(0.1).half())


class Norms(NamedTuple):
    """A half batch norm with statistics in float after three micro-batches, and an eager one."""

    half: nn.BatchNorm1d
    eager: nn.BatchNorm1d
    x: torch.Tensor
    out: torch.Tensor
    want: torch.Tensor


@pytest.fixture(scope="module")
def norms() -> Norms:
    """Return a half batch norm and an eager one in float32 that had the same micro-batches."""
    norm, eager = nn.BatchNorm1d(4).half(), nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = norm.running_mean.float(), norm.running_var.float()
    x = (normal(18, 4) * 3 + 1).half()
    wrapped = training(classifier(norm), options(accumulation=3), lr=0.0)
    out, _ = wrapped(x, torch.zeros(18, dtype=torch.int64))
    wrapped.copyWeightsToHost()
    want = [eager(piece).detach() for piece in x.float().chunk(3)]
    return Norms(norm, eager, x, out, want[-1])


@pytest.mark.slow
@pytest.mark.spec("precision", 9, 21)
def test_a_half_norm_with_float_statistics_computes_in_half(norms: Norms) -> None:
    assert norms.out.dtype == HALF
    assert norms.half.weight.dtype == HALF
    torch.testing.assert_close(norms.out.float()[-6:], norms.want, **near(2, dtype=HALF))


@pytest.mark.slow
@pytest.mark.spec("precision", 9, 21)
def test_float_statistics_of_a_half_norm_are_those_of_a_float_one(norms: Norms) -> None:
    torch.testing.assert_close(dict(norms.half.named_buffers()), dict(norms.eager.named_buffers()))


@pytest.mark.slow
@pytest.mark.spec("precision", 9, 21)
def test_a_half_norm_evaluates_with_its_float_statistics(norms: Norms) -> None:
    got = infer(copy.deepcopy(norms.half).eval(), norms.x)

    want = copy.deepcopy(norms.eager).eval()(norms.x.float()).detach()
    torch.testing.assert_close(got.float(), want, **near(4, dtype=HALF))


@pytest.mark.spec("precision", 13, 14)
def test_losses_have_the_type_of_the_model_and_may_overflow_where_torchs_do() -> None:
    x, y = torch.full((64,), 300.0).half(), torch.zeros(64).half()
    summed = infer(lambda x, y: F.mse_loss(x, y, reduction="sum"), x, y)
    assert summed.dtype == HALF
    assert summed.isinf()
    logits, labels = torch.randn(8, 5).half(), torch.arange(8) % 5
    for function in (F.cross_entropy, lambda x, y: F.nll_loss(F.log_softmax(x, -1), y)):
        agrees(function, logits, labels, **near(2, size=0, dtype=HALF))
    large, target = torch.tensor([[3e4, -3e4, 200.0], [0.0, 1.0, 1.0]]).half()
    stable = F.binary_cross_entropy_with_logits
    loss, largest = infer(lambda x, t: (stable(x, t), x.logsumexp(0)), large, target)
    want = stable(large.double(), target.double())
    torch.testing.assert_close(loss.double(), want, **near(1, size=0, dtype=HALF))
    assert float(largest) == float(large[0])


@pytest.mark.spec("precision", 8, 20)
def test_small_integers_half_buffers_and_32_bit_labels_behave_as_in_torch() -> None:
    small = [torch.arange(0, 120, 7).to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16)]
    agrees(lambda *x: [(t, t.float(), t.half() / 255) for t in x], *small, rtol=0, atol=0)
    table = Having(lambda model, x: model.table * x, table=torch.arange(6.0).half())
    agrees(table, torch.full((6,), 0.5).half(), rtol=0, atol=0)

    def used(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.cross_entropy(x, y), F.nll_loss(x, y), F.one_hot(y, 3), x.gather(1, y[:, None])

    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    got = infer(used, logits, labels.int())
    torch.testing.assert_close(got, used(logits, labels), check_dtype=False)


def test_strided_group_norms_group_every_nth_channel() -> None:
    groups, x, norm = 3, torch.randn(4, 6, 5), nn.GroupNorm(3, 6)
    norm.weight = nn.Parameter(torch.arange(6.0))
    opts = options()
    opts._Popart.set("groupNormStridedChannelGrouping", True)
    apart = x.view(4, 6 // groups, groups, 5)
    mean = apart.mean((1, 3), keepdim=True)
    variance = apart.var((1, 3), keepdim=True, unbiased=False)
    plain = ((apart - mean) / (variance + norm.eps).sqrt()).view_as(x)
    want = (plain * norm.weight[:, None] + norm.bias[:, None]).detach()
    torch.testing.assert_close(infer(norm, x, opts=opts), want, **near(10 + FUNCTION))
    agrees(norm, x)


@pytest.mark.parametrize("weights", [FLOAT, torch.bfloat16])
def test_bfloat16_is_a_type_like_half(weights: torch.dtype) -> None:
    x, labels = torch.randn(8, 3).bfloat16(), torch.arange(8) % 4
    model = classifier(nn.Linear(3, 4))
    exact = model.layer(x.float()).detach()
    out, loss = training(model.to(weights))(x, labels)
    assert dtypes((out, loss)) == [torch.bfloat16] * 2
    torch.testing.assert_close(out.float(), exact, **near(2, dtype=torch.bfloat16))
    assert model.layer.weight.dtype == weights


def test_products_of_half_tensors_are_computed_in_float() -> None:
    layer, x = nn.Linear(64, 32).half(), torch.randn(16, 64).half()
    wrapped = poptorch.inferenceModel(layer, options())
    got = wrapped(x)
    exact = F.linear(x.double(), layer.weight.detach().double(), layer.bias.detach().double())
    assert torch.equal(got, exact.float().half())  # rounded once
    for chosen, kind in ((FLOAT, HALF), (HALF, FLOAT)):  # a choice is for mixtures
        assert infer(copy.deepcopy(layer).to(kind), x.to(kind), opts=choosing(chosen)).dtype == kind
    products = [n for n in graph_of(wrapped).nodes if "addmm" in str(n.target)]
    assert products
    assert all(n.args[1].meta["val"].dtype == FLOAT for n in products)


def _in_one_block(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layer(model.layer(model.layer(x).relu()).relu())
    return torch.nn.functional.mse_loss(h.float(), y)


def _in_two_blocks(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layer(x).relu()
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layer(h)
    return torch.nn.functional.mse_loss(h.float(), y)


def _partly_without(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layer(x)
        with torch.autocast("cpu", enabled=False):
            h = model.layer(h.float())
        h = model.layer(h)
    return torch.nn.functional.mse_loss(h.float(), y)


def _without_the_cache(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        h = model.layer(model.layer(x).relu())
    return torch.nn.functional.mse_loss(h.float(), y)


def _recomputed(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = checkpoint(model.layer, model.layer(x), use_reentrant=False)
    return torch.nn.functional.mse_loss(h.float(), y)


@pytest.mark.parametrize(
    "loss",
    [_in_one_block, _in_two_blocks, _partly_without, _without_the_cache, _recomputed],
)
def test_a_weight_that_several_layers_use_is_converted_as_often_as_in_torch(
    loss: Callable[..., torch.Tensor],
) -> None:
    both = EagerPair(
        Having(loss, layer=torch.nn.Linear(16, 16)), lambda ps: torch.optim.SGD(ps, lr=0.5)
    )
    for _ in range(3):
        both.step(torch.randn(8, 16), torch.randn(8, 16))

    both.compare()


def test_autocast_around_the_call_converts_a_weight_once() -> None:
    def loss(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model.layer(model.layer(x).relu()).float(), y)

    both = EagerPair(
        Having(loss, layer=torch.nn.Linear(16, 16)), lambda ps: torch.optim.SGD(ps, lr=0.5)
    )
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            both.step(torch.randn(8, 16), torch.randn(8, 16))

    both.compare()
