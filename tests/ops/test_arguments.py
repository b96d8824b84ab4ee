"""Operators against their definitions or torch; products, LSTMs; what does not fit."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import poptorch
from helpers import wrapping
from helpers.closeness import FUNCTION, relative
from helpers.memory import peak_of_call
from helpers.wrapping import Having, Scaled, agrees, infer, normal, options, trains_alike
from poptorch import CPU, Error
from poptorch import MatMulSerializationMode as Mode

cond, for_loop, custom_op = poptorch.cond, poptorch.for_loop, poptorch.custom_op
dynamic_slice, dynamic_update = poptorch.dynamic_slice, poptorch.dynamic_update
fps, nearest, decoder = poptorch.fps, poptorch.nearest, poptorch.ctc_beam_search_decoder
ONE, ROW, SQUARE, X = torch.ones(1), torch.ones(2), torch.ones(2, 2), torch.arange(24.0).view(4, 6)
POINTS, ZERO, YES = torch.ones(3, 1), torch.tensor(0), torch.tensor([True])
SCORES, LENGTHS = torch.randn(4, 2, 3), torch.tensor([4, 4])
poptorch.register_custom_op("Same", "test.arguments", 1, lambda inputs, attributes: inputs)


def same(value):
    return value


def twice(value):
    return value, value


def attributed(attributes):
    return custom_op([ROW], "Same", "test.arguments", 1, [ROW], attributes)


def matmul(*rest):
    return poptorch.serializedMatMul(SQUARE, SQUARE, *rest)


def conv(method, value):
    return getattr(poptorch.MultiConv(), method)(value)


ROWS = [
    # Control flow
    (ValueError, "Object is not list", for_loop, 3, same, (ONE,)),
    (ValueError, r"at index 1 is not torch\.tensor", for_loop, 3, twice, [ONE, 2]),
    *((Error, "count", for_loop, count, same, [ONE]) for count in (1.0, True, -1)),
    *(
        (Error, "must return", for_loop, 2, body, [ROW])
        for body in (twice, torch.Tensor.double, lambda a: a[:1], lambda a: None)
    ),
    (ValueError, "Object is not list", cond, YES, same, (ROW,), same, [ROW]),
    (ValueError, "Object is not list", cond, YES, same, [ROW], same, ROW),
    (Error, "must have one element", cond, ROW > 0, same, [ROW], same, [ROW]),
    (Error, "must be a torch", cond, True, same, [ROW], same, [ROW]),
    # Custom operators and host calls
    (ValueError, "All attribute keys must be strings", attributed, {1: 2.0}),
    (ValueError, "Attribute values must be", attributed, {"a": None}),
    (ValueError, "Attribute values must be", attributed, {"a": [[1]]}),
    (ValueError, "must all be the same", attributed, {"a": [1, 2.0]}),
    *(
        (ValueError, "contains non-ASCII characters", attributed, wrong)
        for wrong in ({"ä": 1}, {"a": "ä"}, {"a": ["a", "ä"]})
    ),
    (Error, "is too high for a Popart float attribute", attributed, {"a": 1e39}),
    (Error, "is too low for a Popart float attribute", attributed, {"a": [-1e39]}),
    (Error, "is too high", attributed, {"a": 2**63}),
    (Error, "needs functions", poptorch.register_custom_op, "X", "test.arguments", 1, "forward"),
    (Error, r"must take torch\.tensor inputs", custom_op, [1.0], "Same", "a", 1, [ROW]),
    (ValueError, "Wrong type", poptorch.accessAttributes, 3),
    *(
        (ValueError, "Invalid attribute_id_str", poptorch.accessAttributes, wrong)
        for wrong in ("", "attr:0x7f", "3", "[1]")
    ),
    (Error, "needs a callable and a name", CPU, same, 3),
    (Error, r"must take torch\.tensor arguments", CPU(same, "Same"), [1.0]),
    (Error, "must return tensors", CPU(lambda x: 3, "Three"), ONE),
    # Prints and hints
    (Error, r"must take a torch\.tensor argument", poptorch.ipu_print_tensor, [1.0]),
    (Error, r"nop must take a torch\.tensor argument", poptorch.nop, 3),
    (KeyError, "float_format", lambda: poptorch.ipu_print_tensor(ONE, float_format="hex")),
    (Error, "getIpuTensorId", poptorch.getIpuTensorId, ONE),
    (Error, r"memory for torch\.tensor", poptorch.set_available_memory, [1], 0.5),
    *(
        (Error, "between 0 and 1", poptorch.set_available_memory, ONE, wrong)
        for wrong in (-0.1, 1.5, "half", True)
    ),
    (Error, r"needs a poptorch\.OverlapMode", poptorch.set_overlap_for_input, ONE, "no_overlap"),
    *(
        (ValueError, "All inputs must be tensors", poptorch.recomputationCheckpoint, wrong)
        for wrong in (3, [ONE, 3], None)
    ),
    (AssertionError, "must be a string", poptorch.NameScope, 3),
    (Error, r"module is not an instance of torch\.nn\.Module", poptorch.BeginBlock, 3),
    (AssertionError, r"removeBlocks|Module|module", poptorch.removeBlocks, "model"),
    *(
        (AssertionError, "Invalid available memory prop", conv, "availableMemoryProportions", wrong)
        for wrong in (1, [], 2.0, [0.1, -0.1], "0.1")
    ),
    (ValueError, "Invalid partials types", conv, "partialsTypes", torch.int32),
    (ValueError, "Invalid partials types", conv, "partialsTypes", None),
    (ValueError, "must be bool or list of bools", conv, "enableConvDithering", 1),
    (AssertionError, "Invalid plan type", conv, "planType", 0),
    (AssertionError, "Invalid reserved tiles", conv, "perConvReservedTiles", 1.5),
    (AssertionError, "Invalid cycle back off", conv, "cycleBackOff", 1),
    # Products and slices
    *(
        (AssertionError, "serializedMatMul", matmul, *wrong)
        for wrong in (
            ("input_channels",),
            (Mode.ReducingDim, 2.0),
            (Mode.ReducingDim, True),
            (Mode.ReducingDim, 2, 1),
            (None,),
        )
    ),
    (Error, r"dynamic_slice must take a torch\.tensor input", dynamic_slice, [1], 0, ZERO, 1, 1),
    (Error, r"to dynamic_slice must be a torch\.tensor", dynamic_slice, X, 0, 0, 1, 1),
    (Error, "dim must be an integer", dynamic_slice, X, 0.0, ZERO, 1, 1),
    (Error, "size must be an integer", dynamic_slice, X, 0, ZERO, 1.0, 1),
    (Error, "step must be an integer", dynamic_slice, X, 0, ZERO, 1, True),
    (Error, "start and end of a slice must be different", dynamic_slice, X, 0, ZERO, 0, 1),
    (Error, "end less than the start", dynamic_slice, X, 0, ZERO, -1, 1),
    (Error, "Slicing step must be at least 1", dynamic_slice, X, 0, ZERO, 1, 0),
    (Error, "must be one integer", dynamic_slice, X, 0, torch.tensor(0.0), 1, 1),
    (Error, "must be one integer", dynamic_slice, X, 0, torch.tensor([0, 1]), 1, 1),
    (Error, "out of range", dynamic_slice, X, 2, ZERO, 1, 1),
    (Error, "cannot be longer", dynamic_slice, X, 0, ZERO, 5, 1),
    (Error, "must have same dimensionality", dynamic_update, X, X[0], 0, ZERO, 1),
    (Error, "must have same dtype", dynamic_update, X, X[:1].double(), 0, ZERO, 1),
    (Error, r"must be a torch\.tensor", dynamic_update, X, X[:1], 0, 0, 1),
    (Error, "does not fit", dynamic_update, X, X[:1], 0, ZERO, 2),
    # Points and the decoder
    (Error, "src must be a torch", fps, [[1.0]], [0, 1]),
    (Error, "2-dimensional", fps, torch.ones(3), [0, 3]),
    *(
        (Error, "ptr must be a list", fps, POINTS, ptr)
        for ptr in ((0, 3), [0], [0, 2], [0, 2, 2, 3])
    ),
    *((Error, "ratio must be a float", fps, POINTS, [0, 3], ratio) for ratio in (1, 0.0, 1.5)),
    (Error, "random_start must be a bool", fps, POINTS, [0, 3], 0.5, 1),
    (Error, "x must be a torch", nearest, [1.0], ONE),
    (Error, "y must be a torch", nearest, ONE, 1.0),
    (Error, "list of ints or a tensor", nearest, ROW, ROW, "01", [0, 1]),
    (ValueError, "at most 2 dimensions", nearest, torch.ones(1, 1, 1), ONE),
    (ValueError, "as many features", nearest, torch.ones(1, 2), torch.ones(1, 3)),
    (ValueError, "one entry per row", nearest, ROW, ROW, [0], [0, 1]),
    (ValueError, "must be sorted", nearest, ROW, ROW, [1, 0], [0, 1]),
    (ValueError, "occur in both", nearest, ROW, ROW, [0, 0], [0, 1]),
    (Error, "probs must be a torch", decoder, [1], LENGTHS),
    (Error, "lengths must be a torch", decoder, SCORES, [4, 4]),
    (Error, "must be rank-3", decoder, SCORES[0], LENGTHS),
    (Error, "one entry per sample", decoder, SCORES, LENGTHS[:1]),
    (Error, "out of range", decoder, SCORES, LENGTHS, 3),
    (Error, "out of range", decoder, SCORES, LENGTHS, 0, 2, 3),
    # Policies of autocast
    (TypeError, "fp16 must be a list", lambda: poptorch.autocasting.Policy(fp16="matmul")),
    *(
        (ValueError, "not a function of torch", poptorch.autocasting.Policy, [], [], [], [entry])
        for entry in ("matmull", torch.nn.MultiheadAttention, 3)
    ),
]


@pytest.mark.spec("ops", 9, 13, 16, 17, 18, 24, 26)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{getattr(row[2], '__name__', '')}-{row[1]}")
def test_arguments_that_do_not_fit_are_refused(row) -> None:
    error, phrase, function, *arguments = row
    with pytest.raises(error, match=phrase):
        function(*arguments)


INNER = CPU(same, "Inner")


def failing(x):
    if x.sum():
        raise ArithmeticError("on purpose")
    return x


@pytest.mark.spec("ops", 9, 18)
@pytest.mark.parametrize("error, phrase, function, inputs", [
    *((Error, "must return", lambda x, b=body: for_loop(2, b, [x]), [ROW])
      for body in (twice, torch.Tensor.int, lambda a: a[:1], lambda a: None)),
    *((Error, "same number of tensors", lambda f, x, b=body: cond(f, b, [x], same, [x]), [YES, ROW])
      for body in (twice, torch.Tensor.int, lambda a: a[:1])),
    *((Error, "must divide the dimension", lambda a, m=mode, f=factor:
       poptorch.serializedMatMul(a, a, m, f), [torch.ones(4, 4)])
      for mode in (Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels)
      for factor in (3, 8)),
    (Error, "must not call another poptorch.CPU function", CPU(lambda x: INNER(x), "Outer"), [ROW]),
    (Error, "must return tensors", CPU(lambda x: 3, "Three"), [ROW]),
    (Error, "results of host call 'Changing' changed",
     CPU(lambda x: x[: 1 + int(x.sum())], "Changing"), [torch.ones(4)]),
    (ArithmeticError, "on purpose", CPU(failing, "Failing"), [ROW]),
])  # fmt: skip
def test_what_a_compilation_or_a_call_finds_is_refused(error, phrase, function, inputs) -> None:
    with pytest.raises(error, match=phrase) as caught:
        infer(function, *inputs)
    assert error is not Error or "Where:" in str(caught.value)
    assert infer(INNER, ONE) == 1


def farthest(points: torch.Tensor, count: int, first: int = 0) -> list[int]:
    """Pick points by the definition."""
    picked = [first]
    while len(picked) < count:
        gaps = [min((p - points[q]).norm().item() for q in picked) for p in points]
        picked.append(gaps.index(max(gaps)))
    return picked


def near_two(x, y, batch_x, batch_y) -> list[int]:
    gaps = (x[:, None] - y).norm(dim=-1)
    gaps[torch.tensor(batch_x)[:, None] != torch.tensor(batch_y)] = math.inf
    return gaps.argmin(1).tolist()


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_fps_picks_the_farthest_points_of_each_segment(ratio: float) -> None:
    src, ptr = torch.randn(13, 3), [0, 5, 6, 13]
    expected = []
    for start, end in itertools.pairwise(ptr):
        own = farthest(src[start:end], math.ceil((end - start) * ratio))
        expected += [start + at for at in own]
    result = agrees(lambda x: poptorch.fps(x, ptr, ratio), src)
    assert result.dtype == torch.int32
    assert result.tolist() == expected
    points = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])
    assert poptorch.fps(points, [0, 4], 0.75).tolist() == [0, 1, 2]  # the first of equals


def test_fps_may_start_anywhere() -> None:
    src, ptr = torch.randn(40, 2), [0, 20, 40]
    anywhere = wrapping.Calling(lambda x: poptorch.fps(x, ptr, 0.2, random_start=True))
    model, starts = poptorch.inferenceModel(anywhere, options().randomSeed(1)), set()
    for _ in range(8):
        picked = model(src).tolist()
        for segment, (low, own) in enumerate(((0, picked[:4]), (20, picked[4:]))):
            assert [at - low for at in own] == farthest(src[low : low + 20], 4, own[0] - low)
            starts.add((segment, own[0]))
    assert len(starts) > 4


@pytest.mark.parametrize(
    "features, form", [(3, "none"), (1, "lists"), (3, "tensors"), (3, "mixed")]
)
def test_nearest_looks_within_the_batch(features: int, form: str) -> None:
    x, y = torch.randn(7, features), torch.randn(9, features)
    numbers_x, numbers_y = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2]
    batch_x = {"lists": numbers_x, "none": None}.get(form, torch.tensor(numbers_x))
    batch_y = {"tensors": torch.tensor(numbers_y), "none": None}.get(form, numbers_y)
    if form == "none":
        numbers_x, numbers_y = [0] * 7, [0] * 9
    expected = near_two(x, y, numbers_x, numbers_y)
    if features == 1:
        x, y = x[:, 0], y[:, 0]
    found = agrees(lambda a, b: poptorch.nearest(a, b, batch_x, batch_y), x, y, check_dtype=False)
    assert found.tolist() == expected
    assert found.dtype == torch.int32
    if form == "none":  # also of one side only, and in half precision
        assert poptorch.nearest(x.half(), x.half(), batch_x, [0] * 7).tolist() == [*range(7)]


def every_path(log_probs: torch.Tensor, blank: int) -> list[tuple[float, tuple[int, ...]]]:
    """Log-probability of every label sequence, by summing over all alignments; best first."""
    steps, classes = log_probs.shape
    totals: dict[tuple[int, ...], float] = {}
    for alignment in itertools.product(range(classes), repeat=steps):
        merged = [label for label, _ in itertools.groupby(alignment)]
        path = tuple(label for label in merged if label != blank)
        score = math.exp(sum(log_probs[t, c].item() for t, c in enumerate(alignment)))
        totals[path] = totals.get(path, 0.0) + score
    return sorted(((math.log(p), path) for path, p in totals.items()), reverse=True)


def test_decoded_paths_are_exact_with_a_wide_beam() -> None:
    blank, scores = 2, torch.randn(5, 3, 3).mul(2).log_softmax(-1)
    lengths = torch.tensor([5, 3, 1], dtype=torch.int32)
    results = agrees(lambda p, n: decoder(p, n, blank, 1000, 4), scores, lengths)
    probability, length, path = results
    assert [r.dtype for r in results[:2]] == [torch.float32, torch.int32]
    assert [r.shape for r in results] == [(3, 4), (3, 4), (3, 4, 5)]
    for sample, rank in itertools.product(range(3), range(4)):
        expected = every_path(scores[: lengths[sample], sample], blank)
        if rank >= len(expected):
            assert probability[sample, rank] == -math.inf
            continue
        score, labels = expected[rank]
        rounded = relative(5 * 2 * FUNCTION)  # of five steps, an exponential and a logarithm each
        assert probability[sample, rank].item() == pytest.approx(score, rel=rounded)
        assert length[sample, rank] == len(labels)
        assert path[sample, rank].tolist() == [*labels, *[blank] * (5 - len(labels))]


@pytest.mark.spec("ops", 29)
def test_a_narrow_beam_still_finds_a_clear_path() -> None:
    labels = torch.tensor([1, 1, 0, 1, 2, 2, 0, 3])
    scores = torch.full((8, 1, 4), -8.0).scatter(2, labels.view(8, 1, 1), -0.01)
    probability, length, path = decoder(scores.half(), torch.tensor([8]), beam_width=2)
    assert probability.dtype == torch.float16
    # one path has its dimension
    assert probability.shape == (1, 1)
    assert path.shape == (1, 1, 8)
    assert path[0, 0, : length.item()].tolist() == [1, 1, 2, 3]


def sliced(x, start):
    return (
        poptorch.dynamic_slice(x, 1, start, 3, 2),
        poptorch.dynamic_slice(x, -1, start, 4, 1),
        poptorch.dynamic_update(x, torch.full((2, 6), -1.0), 0, start, 2),
        x,
    )


@pytest.mark.spec("ops", 12, 13)
@pytest.mark.parametrize("dtype, shape", [(torch.int16, (1,)), (torch.int64, ())])
def test_the_start_of_a_slice_is_read_at_run_time(dtype: torch.dtype, shape) -> None:
    """A window goes on at the beginning; an update is in a copy."""
    # An input of no dimensions cannot be cut into micro-batches, but one call needs none.
    model, x = (
        poptorch.inferenceModel(wrapping.Calling(sliced), options()),
        torch.arange(24.0).view(4, 6),
    )
    for start in (2, 4):
        at, updated = torch.full(shape, start, dtype=dtype), x.clone()
        updated[[start % 4, (start + 1) % 4]] = -1
        over = torch.cat([x, x], 1)
        wanted = over[:, start : start + 3 : 2], over[:, start : start + 4], updated, x
        for results in (model(x, at), sliced(x, at)):
            torch.testing.assert_close(results, wanted, rtol=0, atol=0)


def decoded(model, x, lengths, target):
    scores = model.layer(x).log_softmax(-1)
    return decoder(scores, lengths)[2], torch.nn.functional.mse_loss(scores, target)


@pytest.mark.parametrize("model, inputs", [
    (Scaled(lambda x: x[poptorch.fps(x, [0, 4], 0.5)]), [torch.arange(4.0).square()[:, None]]),
    (Scaled(lambda x, start: poptorch.dynamic_update(
        x, poptorch.dynamic_slice(x, 0, start, 2, 1) * 3, 0, start, 2)),
     [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1])]),
    (Having(decoded, layer=torch.nn.Linear(3, 3)),
     [torch.randn(4, 2, 3), torch.tensor([4, 4]), torch.randn(4, 2, 3)]),
])  # fmt: skip
def test_gradients_flow_through_or_pass_by(model, inputs) -> None:
    trains_alike(model, *inputs, lr=0.001)


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
        whole, cut = (peak_of_call(wrapping.training(model), x) for model in models)
        assert cut < 0.4 * whole

    def exactly(factor: int) -> int:
        model = wrapping.Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, factor, True))
        halves = normal(256, 256).half(), normal(256, 256, seed=1).half()
        return peak_of_call(poptorch.inferenceModel(model, options()), *halves)

    assert exactly(2) > 1.2 * exactly(8)


def test_sums_of_halves_keep_their_precision() -> None:
    def total(*, keep: bool) -> float:
        # 2048 + 1 is no half, so that sums in half precision stay at 2048.
        given = torch.ones(1, 4096).half(), torch.ones(4096, 1).half()
        mode = Mode.ReducingDim
        # In eager PyTorch the product is never cut.
        cut = wrapping.Calling(lambda x, y: poptorch.serializedMatMul(x, y, mode, 4096, keep))
        return poptorch.inferenceModel(cut, wrapping.unchecked())(*given).item()

    assert total(keep=False) == 2048
    assert total(keep=True) == 4096


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


@pytest.mark.parametrize(
    "what, dtype", [*((w, torch.float32) for w in OF_GROUPS), ("rows", torch.float64)]
)
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
    # In eager PyTorch the rows of no group hold whatever the memory held.
    got = infer(product, a, b, ends, opts=wrapping.unchecked(iterations=2))
    first = torch.stack([a[0] @ b[0, 0], a[1] @ b[0, 1], a[2] @ b[0, 2], torch.zeros(8)])
    torch.testing.assert_close(got, torch.cat([first, a[4:] @ b[1, 1]]))


REFUSED = {
    "two types": ((8, 8), (1, 8, 8), 1, torch.float16, "BF16|BFloat16|same dtype"),
    "both of three dimensions": ((1, 8, 8), (1, 8, 8), 1, torch.float32, "BF16|offs"),
    "other inner sizes": (
        (8, 8),
        (1, 4, 8),
        1,
        torch.float32,
        "shapes of the operands do not match",
    ),
    "other numbers of groups": (
        (8, 8),
        (2, 8, 8),
        1,
        torch.float32,
        "shapes of the operands do not match",
    ),
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


@pytest.mark.parametrize(
    "settings, accumulation",
    [
        ({}, 1),
        ({"num_layers": 2, "bidirectional": True}, 1),
        ({"batch_first": True}, 4),
    ],
)
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
        model = wrapping.training(both(num_layers=2, dropout=0.5), opts.lanes(lanes), lr=0.001)
        return torch.stack([model(torch.ones(8, 2, 3))[1] for _ in range(2)])

    torch.testing.assert_close(losses(1), losses(0))
