"""Operators that are one each: products, also of groups of rows, and LSTMs."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers import wrapping
from helpers.memory import peak_of_call
from helpers.wrapping import Having, agrees, infer, normal, options, training, trains_alike
from poptorch import MatMulSerializationMode as Mode

CUT = [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels]
SHAPES = [((3, 4, 6), (6, 8)), ((2, 1, 4, 6), (3, 6, 8)), ((6,), (6, 8)), ((4, 6), (6,))]


def product(shape: tuple[int, ...], *rest) -> Having:
    """With a trained operand, or of two; in pieces if ``rest`` says so."""

    def forward(model, x):
        multiply = poptorch.serializedMatMul if rest else torch.matmul
        out = multiply(model.scale * x, model.weight, *rest)
        return out, poptorch.identity_loss(out.square().sum(), "none")

    return Having(forward, weight=nn.Parameter(normal(*shape)), scale=nn.Parameter(torch.ones(())))


@pytest.mark.parametrize("mode", CUT)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_whole_product(mode: Mode, shapes) -> None:
    left, right = shapes
    vector = {Mode.InputChannels: len(left), Mode.OutputChannels: len(right)}.get(mode) == 1
    cut = product(right, mode, 1 if vector else 2)
    trains_alike(cut, normal(1, *left, seed=1).squeeze(0), eager=product(right), lr=0.001)


@pytest.mark.spec("ops", 18)
@pytest.mark.parametrize(
    "rest", [(Mode.Disabled, 7), (Mode.ReducingDim,), (Mode.ReducingDim, 2, True)]
)
def test_it_can_be_left_whole(rest) -> None:
    agrees(lambda a, b: poptorch.serializedMatMul(a, b, *rest), normal(2, 2), normal(2, 2, seed=1))


def test_micro_batches_side_by_side_are_one_product_also_of_operands_without_lanes() -> None:
    cut, x = product((6, 8), Mode.OutputChannels, 4), normal(6, 4, 6)
    model = trains_alike(cut, x, eager=product((6, 8)), accumulation=3, lr=0.001)
    targets = [node.target for node in wrapping.graph_of(model, "step").nodes]
    assert targets.count(torch.ops.poptorch.serialized_matmul.default) == 3  # and two gradients
    given, opts = (normal(8, 4, 6), normal(8, 6, 5)), options(iterations=4)
    agrees(lambda x, y: poptorch.serializedMatMul(x, y, Mode.ReducingDim, 3), *given, opts=opts)


@pytest.mark.parametrize("mode", CUT)
def test_peak_memory_falls_with_the_factor(mode: Mode) -> None:
    if mode is not Mode.InputChannels:
        # The right operand is copied for every row of the batch, 64 times what the weight takes.
        x, models = normal(64, 1, 2, 128), (product((1, 2, 128, 64), mode, n) for n in (1, 8))
        whole, cut = (peak_of_call(training(model), x) for model in models)
        assert cut < 0.4 * whole

    def exactly(factor: int) -> int:
        model = wrapping.Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True))
        halves = normal(256, 256).half(), normal(256, 256, seed=1).half()
        return peak_of_call(poptorch.inferenceModel(model, options()), *halves)

    assert exactly(2) > 1.2 * exactly(8)


def test_sums_of_halves_keep_their_precision() -> None:
    def total(keep: bool) -> float:
        # 2048 + 1 is no half, so that sums in half precision stay at 2048.
        given = torch.ones(1, 4096).half(), torch.ones(4096, 1).half()
        mode = Mode.ReducingDim
        return infer(lambda x, y: poptorch.serializedMatMul(x, y, mode, 4096, keep), *given).item()

    assert (total(False), total(True)) == (2048.0, 4096.0)


GROUPS, LONG, WIDE, OUT = 3, 8, 4, 8
OF_GROUPS = {
    "rows": ((LONG, WIDE), (GROUPS, WIDE, OUT)),
    "columns": ((GROUPS, WIDE, OUT), (OUT, LONG)),
    "inner": ((WIDE, LONG), (LONG, OUT)),
}


def by_hand(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        return torch.cat([a[part] @ b[at] for at, part in enumerate(parts)])
    return torch.cat([a[at] @ b[:, part] for at, part in enumerate(parts)], 1)


@pytest.mark.parametrize("what, dtype", [*((w, torch.float32) for w in OF_GROUPS),
                                         ("rows", torch.float64)])  # fmt: skip
@pytest.mark.parametrize("ends", [[2, 5, LONG], [0, LONG, LONG]])  # or groups without anything
def test_groups_have_matrices_of_their_own(what: str, dtype: torch.dtype, ends) -> None:
    a, b = (nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in OF_GROUPS[what])
    opts = options()
    opts.Precision.narrow64Bit(False)

    def model(product) -> Having:
        def forward(model, given):
            y = product(model.a, model.b, given)
            return y, poptorch.identity_loss(y.sin(), reduction="sum")

        return copy.deepcopy(Having(forward, a=a, b=b))

    grouped = model(lambda a, b, given: nn.functional.grouped_mm(a, b, offs=given[0]))
    eager = model(lambda a, b, _: by_hand(a, b, ends))
    trains_alike(grouped, torch.tensor([ends], dtype=torch.int32), eager=eager, opts=opts)


def test_rows_of_no_group_are_zero_and_micro_batches_have_their_own_groups() -> None:
    def product(a, b, ends):
        return nn.functional.grouped_mm(a, b[0], offs=ends[0])

    a, b = torch.randn(8, 4), torch.randn(2, 3, 4, 8)
    ends = torch.tensor([[1, 2, 3], [0, 4, 4]], dtype=torch.int32)
    got = infer(product, a, b, ends, opts=options(iterations=2))
    first = torch.stack([a[0] @ b[0, 0], a[1] @ b[0, 1], a[2] @ b[0, 2], torch.zeros(8)])
    torch.testing.assert_close(got, torch.cat([first, a[4:] @ b[1, 1]]))


REFUSED = {
    "two types": ((8, 8), (1, 8, 8), 1, torch.float16, "BF16|BFloat16|same dtype"),
    "both of three dimensions": ((1, 8, 8), (1, 8, 8), 1, torch.float32, "BF16|offs"),
    "other inner sizes": ((8, 8), (1, 4, 8), 1, torch.float32, "do not fit together"),
    "other numbers of groups": ((8, 8), (2, 8, 8), 1, torch.float32, "do not fit together"),
}


@pytest.mark.parametrize("a, b, groups, dtype, said", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused(a, b, groups: int, dtype: torch.dtype, said: str) -> None:
    given = torch.randn(a), torch.randn(b).to(dtype), torch.full((groups,), 8, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        nn.functional.grouped_mm(given[0], given[1], offs=given[2])
    with pytest.raises((RuntimeError, poptorch.Error), match=said):
        infer(lambda a, b, ends: nn.functional.grouped_mm(a, b, offs=ends), *given)


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
