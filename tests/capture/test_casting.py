"""Mixed number formats: what layers, operators and losses make of them, beside eager torch."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import graph_of, infer, options, training

HALF, FLOAT = torch.float16, torch.float32


def dtypes(results):
    return [result.dtype for result in results]


class Classifier(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, labels):
        out = self.layer(x).flatten(1)
        return out, F.cross_entropy(out, labels)


def rows(*shape):
    return torch.randn(*shape)


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), rows(6, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), rows(6, 3, 5)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2, padding=1, padding_mode="circular"), rows(6, 3, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 2), rows(6, 3, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(3), rows(6, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), rows(6, 4)),
    "layer norm": (lambda: nn.LayerNorm(3), rows(6, 3)),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        rows(6, 3, 5),
    ),
    "bilinear": (lambda: _Twice(nn.Bilinear(3, 3, 4)), rows(6, 3)),
    "prelu": (lambda: nn.PReLU(3), rows(6, 3)),
    "attention": (lambda: _Attention(), rows(6, 4, 8)),
}


@pytest.mark.parametrize("activation, weights", [(HALF, FLOAT), (FLOAT, HALF)])
@pytest.mark.parametrize(
    "choice, kind", [("HalfUpcastToFloat", FLOAT), ("FloatDowncastToHalf", HALF)]
)
@pytest.mark.parametrize("name", [*LAYERS, "lstm", "rms norm"])
def test_a_choice_governs_layers_too(name, choice, kind, activation, weights):
    opts = options()
    opts.Precision.halfFloatCasting(getattr(poptorch.HalfFloatCastingBehavior, choice))
    others = {"lstm": (lambda: _First(nn.LSTM(3, 4)), rows(6, 2, 3)),
              "rms norm": (lambda: nn.RMSNorm(3), rows(6, 3))}  # fmt: skip
    make, x = (LAYERS | others)[name]
    layer = make()
    exact = layer(x.to(activation).to(kind).float()).detach()
    got = infer(layer.to(weights), x.to(activation), opts=opts)
    assert got.dtype == kind
    torch.testing.assert_close(got.float(), exact, rtol=4e-3, atol=4e-3)


class _First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class _Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.spec("precision", 2, 3)
@pytest.mark.parametrize("activation, weights", [(HALF, FLOAT), (FLOAT, HALF), (HALF, HALF)])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_follow_the_activations(name, activation, weights):
    make, x = LAYERS[name]
    layer = make()
    exact = layer(x.to(activation).float()).detach()  # before the wrapped model updates statistics
    got = infer(layer.to(weights), x.to(activation))
    assert got.dtype == activation
    torch.testing.assert_close(got.float(), exact, rtol=4e-3, atol=4e-3)
    assert {p.dtype for p in layer.parameters()} == {weights}


@pytest.mark.spec("precision", 2)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_half_activations_train_float_weights(accumulation):
    """The update happens in float32: a change that half could not hold is not lost."""
    layer = nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    model = Classifier(layer)
    opts = options(accumulation=accumulation)
    wrapped = training(model, opts, lr=1e-5)
    x, labels = rows(8, 3).half(), torch.arange(8) % 4
    for _ in range(3):
        out, loss = wrapped(x, labels)
        assert dtypes((out, loss)) == [HALF, HALF]
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {FLOAT}
    change = (state["layer.weight"] - 1).abs().max()
    assert 0 < float(change) < 2.0**-11  # half a step of float16 at 1


@pytest.mark.spec("precision", 2)
def test_training_in_half_with_master_weights_converges():
    torch.manual_seed(3)
    model = Classifier(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    wrapped = training(model, lr=0.2)
    x = torch.randn(48, 6)
    labels = x[:, :3].argmax(1)
    losses = [float(wrapped(x.half(), labels)[1]) for _ in range(60)]
    assert losses[-1] < 0.4 * losses[0]


def mixtures():
    """Functions of a float and a half matrix, and whether torch takes the mixture itself."""
    index, labels = torch.tensor([2, 0, 1, 3]), torch.arange(4)
    rows_of = index[:, None].expand(4, 4).contiguous()
    promoting = {
        "+": lambda a, h: a + h, "- reversed": lambda a, h: h - a, "*": torch.mul,
        "/": lambda a, h: h / a, "%": lambda a, h: a % h,
        "**": lambda a, h: h.abs() ** a, "maximum": torch.maximum, "max": torch.max,
        "fmin": torch.fmin, "clamp": lambda a, h: a.clamp(max=h), "atan2": torch.atan2,
        "hypot": torch.hypot, "copysign": torch.copysign, "logaddexp": torch.logaddexp,
        "outer": lambda a, h: torch.outer(a[0], h[0]), "xlogy": lambda a, h: a.abs().xlogy(h.abs()),
        "addcdiv": lambda a, h: h.addcdiv(a, a), "addcmul": lambda a, h: torch.addcmul(a, h, a),
        "kron": torch.kron, "where": lambda a, h: torch.where(a > 0, h, a), "dist": torch.dist,
        "cat": lambda a, h: torch.cat([h, a]), "stack": lambda a, h: torch.stack((a, h)),
        "cosine": F.cosine_similarity, "pairwise": F.pairwise_distance,
        "a number on a tensor": lambda a, h: h * a[0, 0],
    }  # fmt: skip
    refusing = {
        "@": lambda a, h: a @ h, "@ the other way": lambda a, h: h @ a, "matmul": torch.matmul,
        "mm": torch.mm, "bmm": lambda a, h: torch.bmm(a[None], h[None]),
        "mv": lambda a, h: a.mv(h[0]), "dot": lambda a, h: a[0].dot(h[1]), "inner": torch.inner,
        "addmm": lambda a, h: torch.addmm(a, h, a), "addmm bias": lambda a, h: torch.addmm(h, a, a),
        "addmv": lambda a, h: torch.addmv(a[0], h, a[1]),
        "addbmm": lambda a, h: torch.addbmm(a, h[None], a[None]),
        "baddbmm": lambda a, h: torch.baddbmm(a[None], a[None], h[None]),
        "einsum": lambda a, h: torch.einsum("ij,kj->ik", a, h),
        "einsum of a list": lambda a, h: torch.einsum("ij,kj->ik", [h, a]),
        "tensordot": lambda a, h: torch.tensordot(a, h, 1),
        "multi_dot": lambda a, h: torch.linalg.multi_dot([a, h, a]),
        "vecdot": torch.linalg.vecdot, "lerp": lambda a, h: torch.lerp(a, h, 0.3),
        "cross": lambda a, h: torch.linalg.cross(a[:, :3], h[:, :3]),
        "attention": lambda a, h: F.scaled_dot_product_attention(a[None], h[None], h[None]),
        "embedding_bag": lambda a, h: F.embedding_bag(
            index[None], a, per_sample_weights=h[:1], mode="sum"),
        "index_add": lambda a, h: a.index_add(0, index, h),
        "scatter": lambda a, h: h.scatter(0, rows_of, a),
        "scatter_add": lambda a, h: a.scatter_add(0, rows_of, h),
        "index_put": lambda a, h: a.index_put((index,), h),
        "nll with weights": lambda a, h: F.nll_loss(h, labels, weight=a[0].detach().abs()),
        "bce": lambda a, h: F.binary_cross_entropy(a.sigmoid(), h.abs() / 4),
        "huber": F.huber_loss, "mse": F.mse_loss,
        "l1": F.l1_loss, "smooth l1": F.smooth_l1_loss,
        "with logits": lambda a, h: F.binary_cross_entropy_with_logits(a, h.abs()),
        "kl_div": lambda a, h: F.kl_div(a, h.abs(), reduction="sum"),
    }  # fmt: skip
    return {**dict.fromkeys(promoting, True), **dict.fromkeys(refusing, False)}, {
        **promoting,
        **refusing,
    }


PROMOTED, MIXED = mixtures()
GROUPS = [list(MIXED)[first : first + 7] for first in range(0, len(MIXED), 7)]  # captured at once


@pytest.mark.spec("precision", 1)
@pytest.mark.parametrize("upcast, training_mode", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_mixed_operands_get_one_type(names, upcast, training_mode):
    """By default half, and float with HalfUpcastToFloat; exactly what eager makes of such."""
    functions = [MIXED[name] for name in names]
    a, h = (t.to(torch.float16).float() for t in (rows(4, 4), rows(4, 4)))
    opts = options()
    if upcast:
        opts.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
    if training_mode:
        results, gradients = trained(functions, a, h.half(), opts)
    else:
        results = infer(lambda a, h: [f(a, h) for f in functions], a, h.half(), opts=opts)
        gradients = [None] * len(names)
    for name, result, changes in zip(names, results, gradients, strict=True):
        try:
            compare_mixed(name, a, h, result, changes, upcast)
        except BaseException as error:
            error.add_note(name)
            raise


def compare_mixed(name, a, h, result, gradients, upcast):
    """Compare the result of one function, and the gradients if there are any, with eager torch."""
    kind = FLOAT if upcast else HALF
    a, h = (t.clone().requires_grad_() for t in (a, h))
    if upcast and PROMOTED[name]:
        h = h.detach().half().requires_grad_()  # torch knows what to do
    # Half results are those of float32, rounded: half itself adds up too coarsely to compare.
    want = MIXED[name](a, h)
    if name == "a number on a tensor" and upcast:
        kind = HALF  # torch's rule: a number does not change the type of a tensor
    assert result.dtype == kind
    near = {"rtol": 4e-3, "atol": 8e-3} if kind == HALF else {}
    torch.testing.assert_close(result.float(), want.detach().float(), **near)
    for got, leaf in zip(gradients or (), (a, h), strict=bool(gradients)):
        (expected,) = torch.autograd.grad(want.sum(), leaf, retain_graph=True, allow_unused=True)
        expected = torch.zeros_like(got) if expected is None else expected.float()
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=6e-2)


def trained(functions, a, h, opts):
    """What functions of two weights each return, and the gradients of these, by function."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.h = (
                nn.ParameterList(value.clone() for _ in functions) for value in (a, h)
            )

        def forward(self):
            outs = [
                function(*pair) for function, *pair in zip(functions, self.a, self.h, strict=True)
            ]
            return outs, poptorch.identity_loss(sum(out.float().sum() for out in outs), "none")

    model = Model()
    outs, _ = training(model, opts, lr=1.0)()
    pairs = zip(model.a, model.h, strict=True)
    return outs, [[a - p.detach(), h.float() - q.detach().float()] for p, q in pairs]


def test_a_mixture_in_place_keeps_the_type_of_what_changes():
    a, h = rows(4, 4), rows(4, 4).half()

    def change(a, h):
        return a.clone().add_(h), h.clone().mul_(a), a.clone().addmm_(h, h), h.clone().addmm_(a, h)

    got = infer(change, a, h)
    assert dtypes(got) == [FLOAT, HALF, FLOAT, HALF]
    wide = h.float()
    for result, want in zip(got, change(a, wide), strict=True):
        torch.testing.assert_close(result.float(), want, rtol=2e-3, atol=8e-3)


def test_numbers_and_equal_types_are_left_alone():
    a, h = rows(4, 4), rows(4, 4).half()
    got = infer(lambda a, h: (h + 1.5, h**2, a + a, a @ a, a.to(h.dtype), h.type_as(a)), a, h)
    assert dtypes(got) == [HALF, HALF, FLOAT, FLOAT, HALF, FLOAT]


@pytest.mark.parametrize(
    "choice", [poptorch.HalfFloatCastingBehavior.FloatDowncastToHalf, "anything"]
)
def test_the_choice_is_deprecated(caplog, choice):
    opts = options()
    assert opts.Precision.halfFloatCasting(choice) is opts.Precision
    assert "deprecated" in caplog.text
    a, h = rows(4, 4), rows(4, 4).half()
    assert torch.equal(infer(lambda a, h: a + h, a, h, opts=opts), a.half() + h)


RECURRENT = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "lstm cell": lambda: nn.LSTMCell(3, 4),
    "gru cell": lambda: nn.GRUCell(3, 4),
}


@pytest.mark.slow
@pytest.mark.spec("precision", 2, 3)
@pytest.mark.parametrize(
    "activation, weights, lanes", [(HALF, FLOAT, 1), (HALF, FLOAT, 3), (FLOAT, HALF, 3)]
)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_follow_their_input(name, activation, weights, lanes):
    torch.manual_seed(1)
    layer = RECURRENT[name]()
    x = (rows(3, 2, 3) if "cell" not in name else rows(3, 3)).to(activation)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            out = run(self.layer, x)
            return out, poptorch.identity_loss(out.float().square().mean(), "none")

    def run(layer, x):
        if "cell" not in name:
            return layer(x)[0]
        state = torch.ones(3, 4)  # float32, whatever comes in
        return layer(x, (state, state))[0] if name == "lstm cell" else layer(x, state)

    exact = run(layer, x.float()).detach()
    model = Net().to(weights)
    before = [p.detach().clone() for p in model.parameters()]
    out, loss = training(model, options(accumulation=lanes), lr=1.0)(torch.cat([x] * lanes))
    assert out.dtype == activation
    torch.testing.assert_close(out[: len(exact)].float(), exact, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(loss, exact.square().mean(), rtol=4e-3, atol=4e-3)
    moved = [b != p for b, p in zip(before, model.parameters(), strict=True)]
    assert all(m.any() for m in moved)
    assert {p.dtype for p in model.parameters()} == {weights}
    assert "check_input" not in vars(layer)


@pytest.mark.spec("precision", 4)
def test_64_bit_types_come_back_as_32_bit_and_one_line_says_so(caplog):
    from poptorch._capture import micro

    micro.say_narrowed.cache_clear()
    caplog.set_level("INFO", logger="poptorch::python")
    whole, real = torch.arange(4) + 2**20, torch.randn(4, dtype=torch.float64)
    for _ in range(2):
        got = infer(lambda i, x: (i, x, x.argmax(), torch.tensor(5)), whole, real)
        assert dtypes(got) == [torch.int32, FLOAT, torch.int32, torch.int32]
        assert torch.equal(got[0].long(), whole)
        assert torch.equal(got[1], real.float())
    texts = [r.getMessage() for r in caplog.records if "not supported natively" in r.getMessage()]
    assert len(texts) == 2
    assert "torch.float64" in texts[0]
    assert "torch.int64" in texts[1]
    wide = options()
    wide.Precision.narrow64Bit(False)
    assert dtypes(infer(lambda i, x: (i, x), whole, real, opts=wide)) == [
        torch.int64,
        torch.float64,
    ]


def test_labels_are_no_reason_to_say_anything(caplog):
    from poptorch._capture import micro

    micro.say_narrowed.cache_clear()
    caplog.set_level("INFO", logger="poptorch::python")
    got = infer(lambda x, y: x[y], rows(4, 3), torch.arange(4))
    assert got.dtype is FLOAT
    assert not [r for r in caplog.records if "natively" in r.getMessage()]


@pytest.mark.spec("precision", 4)
def test_double_parameters_are_trained_in_float_and_stay_double():
    model = Classifier(nn.Linear(3, 4).double())
    before = model.layer.weight.detach().clone()
    training(model)(rows(8, 3).double(), torch.arange(8) % 4)
    after = model.state_dict()["layer.weight"]
    assert after.dtype == torch.float64
    assert not torch.equal(after, before)
    assert torch.equal(after.float().double(), after)


@pytest.mark.spec("precision", 5)
def test_casts_leave_their_operand_alone():
    x = rows(4)

    def cast(x):
        h = x.half()
        h.add_(1)
        return h, x, x.to(HALF), x.float()

    got = infer(cast, x)
    assert dtypes(got) == [HALF, FLOAT, HALF, FLOAT]
    assert torch.equal(got[0], x.half() + 1)
    assert torch.equal(got[1], x)
    assert torch.equal(got[3], x)


TYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


@pytest.mark.spec("precision", 6)
@pytest.mark.parametrize("target", TYPES)
def test_sums_of_every_pair_in_every_type(target):
    pairs = list(itertools.product(TYPES, TYPES))
    a = torch.tensor([1.5, -2.25, 100.0])
    b = torch.tensor([0.5, 4.75, -7.0])

    def sums(a, b):
        return [(a.to(s) + b.to(t)).type(target) for s, t in pairs]

    narrow = {torch.float64: torch.float32, torch.int64: torch.int32}
    for got, want in zip(infer(sums, a, b), sums(a, b), strict=True):
        assert got.dtype == narrow.get(target, target)
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-3, atol=0)


@pytest.mark.spec("precision", 7)
def test_factories_take_the_type_of_their_input():
    def made(x):
        like = [torch.ones(3, dtype=x.dtype), torch.full((2,), 0.1, dtype=x.dtype)]
        like += [torch.zeros_like(x), x.new_ones(2), torch.rand(2, dtype=x.dtype)]
        return [*like, torch.empty_like(x).normal_(), torch.normal(x, 1.0), x.dtype == HALF]

    *tensors, known = infer(made, rows(4).half())
    assert dtypes(tensors) == [HALF] * 7
    assert known is True
    assert float(tensors[1][0]) == float(torch.tensor(0.1).half())


@pytest.mark.spec("precision", 8)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_small_integers_pass_and_can_be_cast(dtype):
    x = torch.arange(0, 120, 7).to(dtype)
    same, single, half = infer(lambda x: (x, x.float(), x.half()), x)
    assert same.dtype == dtype
    assert torch.equal(same, x)
    assert torch.equal(single, x.float())
    assert torch.equal(half, x.half())
    images = torch.randint(0, 255, (2, 3), dtype=torch.uint8)
    layer = nn.Linear(3, 2)
    got = infer(lambda x: layer(x.half() / 255), images)
    torch.testing.assert_close(got.float(), layer(images / 255).detach(), rtol=2e-3, atol=2e-3)


@pytest.mark.spec("precision", 9)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_running_statistics_have_a_type_of_their_own(accumulation):
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(4).half()
    norm.running_mean = norm.running_mean.float()
    norm.running_var = norm.running_var.float()
    model = Classifier(norm)
    eager = nn.BatchNorm1d(4)
    x = (torch.randn(6 * accumulation, 4) * 3 + 1).half()
    wrapped = training(model, options(accumulation=accumulation), lr=0.0)
    out, _ = wrapped(x, torch.zeros(6 * accumulation, dtype=torch.int64))
    for piece in x.float().chunk(accumulation):
        want = eager(piece).detach()
    assert out.dtype == HALF
    torch.testing.assert_close(out.float()[-6:], want, rtol=2e-3, atol=2e-3)
    assert dtypes((norm.running_mean, norm.running_var, norm.weight)) == [FLOAT, FLOAT, HALF]
    torch.testing.assert_close(norm.running_mean, eager.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var, eager.running_var, rtol=1e-5, atol=1e-5)
    got = infer(norm.eval(), x)
    torch.testing.assert_close(got.float(), eager.eval()(x.float()).detach(), rtol=4e-3, atol=4e-3)


@pytest.mark.spec("precision", 13)
def test_losses_have_the_type_of_the_model_and_may_overflow():
    x, y = torch.full((64,), 300.0).half(), torch.zeros(64).half()
    summed = infer(lambda x, y: F.mse_loss(x, y, reduction="sum"), x, y)
    assert summed.dtype == HALF
    assert summed.isinf()
    logits, labels = rows(8, 5).half(), torch.arange(8) % 5
    loss = infer(F.cross_entropy, logits, labels)
    assert loss.dtype == HALF
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels), rtol=2e-3, atol=0)
    likely = infer(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), logits, labels)
    assert likely.dtype == HALF


@pytest.mark.spec("precision", 14)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_stable_losses_of_large_logits_are_finite(dtype):
    logits = torch.tensor([3e4, -3e4, 200.0]).to(dtype)
    target = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    got = infer(lambda x, t: F.binary_cross_entropy_with_logits(x, t), logits, target)
    assert torch.isfinite(got)
    want = F.binary_cross_entropy_with_logits(logits.double(), target.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    got = infer(lambda x: x.logsumexp(0), logits)
    assert float(got) == float(logits[0])


@pytest.mark.spec("precision", 17)
def test_later_calls_have_the_type_of_the_first():
    wrapped = poptorch.inferenceModel(nn.Embedding(4, 2), options())
    first = wrapped(torch.tensor([0, 3]))
    with pytest.raises(poptorch.Error, match="Data type mismatch"):
        wrapped(torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(wrapped(torch.tensor([0, 3])), first)


@pytest.mark.spec("precision", 18)
def test_half_and_float_are_compared_in_float():
    tenth = torch.tensor([0.1, 0.5])

    def compare(h, f):
        return h == f, h < f, h.half() == f.half(), h == 0.5

    equal, less, same, half = infer(compare, tenth.half(), tenth)
    assert equal.tolist() == [False, True]
    assert less.tolist() == [True, False]
    assert same.tolist() == [True, True]
    assert half.tolist() == [False, True]


@pytest.mark.spec("precision", 19)
def test_comparisons_are_bool():
    x = rows(4)
    results = infer(lambda x: (x > 0, x == x, torch.isnan(x), ~(x > 0), (x > 0) & (x < 1)), x)
    assert dtypes(results) == [torch.bool] * 5
    assert torch.equal(results[0], x > 0)


@pytest.mark.spec("precision", 20)
def test_half_buffers_of_a_model_without_parameters():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(6.0).half())

        def forward(self, x):
            return self.table * x

    got = poptorch.inferenceModel(Table(), options())(torch.full((6,), 0.5).half())
    assert got.dtype == HALF
    assert got.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@pytest.mark.spec("precision", 21)
def test_integer_buffers_keep_their_type_after_training():
    model = Classifier(nn.BatchNorm1d(4))
    wrapped = training(model)
    for _ in range(3):
        wrapped(rows(6, 4), torch.zeros(6, dtype=torch.int64))
    state = model.state_dict()
    assert state["layer.num_batches_tracked"].dtype == torch.int64
    assert int(state["layer.num_batches_tracked"]) == 3
    assert Classifier(nn.BatchNorm1d(4)).load_state_dict(state).missing_keys == []


def test_labels_of_32_bits_are_labels():
    logits, labels = rows(4, 3), torch.tensor([0, 2, 1, 1])
    narrow = labels.int()
    for function in (F.cross_entropy, lambda x, y: F.nll_loss(F.log_softmax(x, -1), y)):
        torch.testing.assert_close(infer(function, logits, narrow), function(logits, labels))
    hot = infer(lambda y: F.one_hot(y, 3), narrow)
    assert torch.equal(hot.long(), F.one_hot(labels, 3))
    picked = infer(lambda x, y: x.gather(1, y[:, None]), logits, narrow)
    assert torch.equal(picked, logits.gather(1, labels[:, None]))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_of_every_nth_channel(groups):
    x, norm = rows(4, 6, 5), nn.GroupNorm(groups, 6)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    opts = options()
    opts._Popart.set("groupNormStridedChannelGrouping", True)
    apart = x.view(4, 6 // groups, groups, 5)
    mean = apart.mean((1, 3), keepdim=True)
    variance = apart.var((1, 3), keepdim=True, unbiased=False)
    plain = ((apart - mean) / (variance + norm.eps).sqrt()).view_as(x)
    want = (plain * norm.weight[:, None] + norm.bias[:, None]).detach()
    torch.testing.assert_close(infer(norm, x, opts=opts), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(infer(norm, x), norm(x).detach())


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.to_sparse_csr()])
def test_sparse_inputs_are_refused(make):
    wrapped = poptorch.inferenceModel(nn.Linear(3, 2), options())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of beta state
        sparse = make(torch.eye(3))
    with pytest.raises(poptorch.Error, match="Unsupported tensor input type"):
        wrapped(sparse)
    assert wrapped(torch.eye(3)).shape == (3, 2)


def test_bfloat16_is_a_type_like_half():
    x, labels = rows(8, 3).bfloat16(), torch.arange(8) % 4
    model = Classifier(nn.Linear(3, 4))
    out, loss = training(model)(x, labels)
    assert dtypes((out, loss)) == [torch.bfloat16] * 2
    assert model.layer.weight.dtype == FLOAT
    low = Classifier(nn.Linear(3, 4).bfloat16())
    eager = low.layer(x).detach()
    out, _ = training(low)(x, labels)
    torch.testing.assert_close(out, eager, rtol=2e-2, atol=2e-2)
    assert low.layer.weight.dtype == torch.bfloat16


def test_products_of_half_tensors_are_computed_in_float():
    layer, x = nn.Linear(64, 32).half(), rows(16, 64).half()
    wrapped = poptorch.inferenceModel(layer, options())
    got = wrapped(x)
    exact = F.linear(x.double(), layer.weight.detach().double(), layer.bias.detach().double())
    assert torch.equal(got, exact.float().half())  # rounded once
    products = [n for n in graph_of(wrapped).nodes if "addmm" in str(n.target)]
    assert products
    assert all(n.args[1].meta["val"].dtype == FLOAT for n in products)
