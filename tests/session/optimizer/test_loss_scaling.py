"""Loss scaling, accumulators, and stochastic rounding of what is stored."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import relative
from helpers.wrapping import (
    Calling,
    EagerPair,
    Graded,
    Having,
    Scaled,
    agrees,
    infer,
    options,
    training,
)

HALF = torch.float16
HALF_MAX = torch.finfo(HALF).max
TINY = 2.0**-26  # half of the smallest half number


def wrap(
    opts: poptorch.Options | None = None,
    dtype: torch.dtype = HALF,
    factor: float = 1.0,
    **settings: Any,
) -> tuple[Having, torch.optim.SGD, poptorch.PoplarExecutor]:
    """The gradient of the weight is the mean of the input, or a part of that."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        out = model.weight * x
        mean = out.mean() if factor == 1 else out.float().mean() * factor
        return poptorch.identity_loss(mean, "none")

    model = Having(forward, weight=torch.nn.Parameter(torch.zeros(1, dtype=dtype)))
    optimizer = poptorch.optim.SGD(model.parameters(), **{"lr": 1.0, **settings})
    return model, optimizer, poptorch.trainingModel(model, opts or options(), optimizer)


def weight(model: nn.Module) -> float:
    return float(model.weight.detach())


@pytest.mark.spec("optimizers", 7)
@pytest.mark.spec("precision", 22)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_loss_is_not_scaled_and_tiny_gradients_survive(accumulation: int) -> None:
    """With float32 weights and half activations the gradient passes through half."""
    model = Scaled(lambda x: x)
    model.forward = lambda x: poptorch.identity_loss(
        ((model.weight.half() * x.half()).float() * TINY).mean(), "none"
    )
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1024.0, loss_scaling=1.0)
    wrapped = poptorch.trainingModel(model, options(accumulation=accumulation), optimizer)
    for scaling, moved in ((1.0, 0.0), (1024.0, 1024 * TINY), (512.0, 1024 * TINY)):
        optimizer.loss_scaling = scaling  # it may change
        wrapped.setOptimizer(optimizer)
        before = weight(model)
        assert float(wrapped(torch.ones(accumulation))) == pytest.approx(before * TINY)
        assert before - weight(model) == pytest.approx(moved)


def automatic(**counts: Any) -> poptorch.Options:
    opts = options(**counts)
    opts.Training.setAutomaticLossScaling(True)
    return opts


def factor(optimizer: torch.optim.SGD) -> float:
    return float(optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"])


def test_the_automatic_factor_follows_the_gradients() -> None:
    opts = automatic(accumulation=4)
    opts.anchorTensor("scale", "finalLossScale")
    model, optimizer, wrapped = wrap(opts, loss_scaling=4.0)
    small, large = torch.full((4,), 2.0**-6).half(), torch.full((4,), 600.0)
    scales, factors = [], []
    for x in (small, small, large.half(), large.half(), small):
        wrapped(x)
        scales.append(float(wrapped.getAnchoredTensor("scale").flatten()[-1]))
        factors.append(factor(optimizer))
    # 600 x 16 lies beyond an eighth of the largest half number (8188), and so does 600 x 8 x 2.
    assert factors == [2.0, 4.0, 2.0, 4.0, 8.0]
    assert scales == [4.0, 8.0, 16.0, 8.0, 16.0]
    assert weight(model) == pytest.approx(-(3 * 2.0**-6 + 2 * 600), rel=relative(1, dtype=HALF))


EDGES = [
    ([HALF_MAX / 8], 1.0, 2.0),
    ([HALF_MAX / 7], 1.0, 0.5),
    ([TINY], 2.0**24, 2.0**24),
    ([float("inf")], 2.0**-24, 2.0**-24),
    ([1.0, HALF_MAX, 1.0], 1.0, 0.5),  # one micro-batch is enough
]


@pytest.mark.slow
@pytest.mark.parametrize(("gradients", "before", "after"), EDGES)
def test_the_factor_doubles_or_halves_between_bounds(
    gradients: list[float], before: float, after: float
) -> None:
    part = TINY if gradients == [TINY] else 1.0
    _, optimizer, wrapped = wrap(automatic(accumulation=len(gradients)).lanes(1), factor=part)
    x = torch.tensor(gradients, dtype=torch.float32).div(part).half()
    wrapped.compile(x)
    assert factor(optimizer) == 1.0
    saved = optimizer.state_dict()
    saved["ipu_state"]["lossScaleUpdateFactor"] = torch.tensor(before)
    optimizer.load_state_dict(saved)
    wrapped(x)
    assert factor(optimizer) == after


def test_the_factor_is_kept_in_checkpoints_and_makes_the_scale_variable() -> None:
    model, optimizer, wrapped = wrap(automatic())
    for _ in range(3):
        wrapped(torch.full((1,), 2.0**-6).half())
    assert factor(optimizer) == 8.0
    state = optimizer.state_dict()
    _, other, other_wrapped = wrap(automatic())
    other.load_state_dict(state)
    other_wrapped(torch.full((1,), 2.0**-6).half())
    assert factor(other) == 16.0
    optimizer.loss_scaling = 32.0
    wrapped.setOptimizer(optimizer)  # variable, though it was not passed to the constructor
    wrapped(torch.full((1,), 2.0**-6).half())
    assert weight(model) == pytest.approx(-4 * 2.0**-6)


def test_without_half_weights_automatic_scaling_says_that_it_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer, wrapped = wrap(automatic(), dtype=torch.float32)
    assert float(wrapped(torch.ones(1))) == 0.0
    wrapped(torch.ones(1))
    assert weight(model) == -2.0
    assert caplog.text.count("setAutomaticLossScaling has no effect") == 1
    assert "lossScaleUpdateFactor" not in optimizer.state_dict()["ipu_state"]


@pytest.mark.spec("optimizers", 10)
@pytest.mark.spec("precision", 15)
@pytest.mark.parametrize("settings", [{}, {"accum_type": HALF}])
def test_accumulators_of_half_weights_are_float_by_default(
    settings: dict[str, torch.dtype],
) -> None:
    given = options(accumulation=4).lanes(1)
    model, _, wrapped = wrap(given, **settings)
    wrapped(torch.ones(4).half())
    accumulator = wrapped.plan().program.state_slots()["accum.weight"]
    assert accumulator.dtype == settings.get("accum_type", torch.float32)
    strategy, users = (
        each.Training.meanAccumulationAndReplicationReductionStrategy
        for each in (wrapped.options, given)
    )
    assert (strategy == poptorch.MeanReductionStrategy.Running) == bool(settings)
    assert users == poptorch.MeanReductionStrategy.Post
    with pytest.raises(AttributeError, match="frozen"):
        wrapped.options.deviceIterations(2)
    assert model.weight.dtype == HALF
    assert weight(model) == -1.0


@pytest.mark.parametrize(
    "kind, settings, dtype, expected_value",
    [
        (poptorch.ReductionType.Mean, {"accum_type": HALF}, torch.float32, -35000.0),
        (poptorch.ReductionType.Sum, {"accum_type": HALF}, torch.float32, -float("inf")),
        (poptorch.ReductionType.Mean, {"use_combined_accum": True}, HALF, -35000.0),
    ],
)
def test_means_stay_in_range_where_a_sum_overflows(
    kind: poptorch.ReductionType,
    settings: dict[str, bool | torch.dtype],
    dtype: torch.dtype,
    expected_value: float,
) -> None:
    """A running mean does, and a velocity to which gradients are added already divided."""
    opts = options(accumulation=4).lanes(1)
    opts.Training.accumulationAndReplicationReductionType(kind)
    model, _, wrapped = wrap(opts, dtype=dtype, **settings)
    wrapped(torch.tensor([40000.0, 20000.0, 30000.0, 50000.0], dtype=dtype))
    assert weight(model) == pytest.approx(expected_value, rel=relative(1, dtype=HALF))


COUNT = 20_000


def weights(dtype: torch.dtype = torch.float16, count: int = COUNT) -> Having:
    return Having(
        lambda m, x: poptorch.identity_loss((m.weight * x).float().sum(), "none"),
        weight=torch.nn.Parameter(torch.ones(count, dtype=dtype)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "after"), [(4_000_000, 0.5), (6_000_000, 2.0)])
def test_of_ten_million_gradients_one_may_be_beyond(count: int, after: float) -> None:
    """The share counts gradients of both micro-batches; the large ones are in one of them."""
    model, x = weights(count=count), torch.zeros(2, count).half()
    x[0, 0] = HALF_MAX
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    poptorch.trainingModel(model, automatic(accumulation=2).lanes(1), optimizer)(x)
    assert factor(optimizer) == after


def rounding(seed: int = 1, enabled: bool = True, **counts: Any) -> poptorch.Options:
    opts = options(**counts).randomSeed(seed)
    opts.Precision.enableStochasticRounding(enabled)
    return opts


def trained(
    opts: poptorch.Options, lr: float = 2.0**-13, calls: int = 4, rows: int = 1
) -> tuple[torch.Tensor, poptorch.PoplarExecutor]:
    model = weights()
    wrapped = training(model, opts, lr)
    for _ in range(calls):
        wrapped(torch.ones(rows, 1).half())
    return model.weight.detach().double(), wrapped


def test_updates_too_small_for_half_arrive_on_average() -> None:
    """Each update is a quarter of the distance to the next half number below 1."""
    rounded, _ = trained(rounding())
    assert (
        abs(float(rounded.mean()) - 1 + 4 * 2.0**-13) < 5 * (4 * 2.0**-22 * 0.1875 / COUNT) ** 0.5
    )
    nearest, _ = trained(rounding(enabled=False))
    assert torch.equal(nearest, torch.ones_like(nearest))


@pytest.mark.slow
def test_one_seed_one_sequence_that_continues_after_detaching() -> None:
    expected_value, _ = trained(rounding(seed=1))
    assert not torch.equal(expected_value, trained(rounding(seed=2))[0])
    _, wrapped = trained(rounding(seed=1), calls=2)
    wrapped.detachFromDevice()
    for _ in range(2):
        wrapped(torch.ones(1, 1).half())
    assert torch.equal(wrapped.model.weight.detach().double(), expected_value)
    replicated, _ = trained(rounding(replicas=2), rows=2)
    assert torch.equal(replicated, expected_value)  # the same mean gradient, the same stream


def test_half_accumulators_are_unbiased() -> None:
    """Gradients of 1 + 2**-12 cannot be added up in half; on average they are."""
    opts = rounding(accumulation=4)
    opts.lanes(1)
    model = weights(torch.float32)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    poptorch.trainingModel(model, opts, optimizer)(torch.full((4, 1), 1 + 2.0**-12))
    moved = 1 - model.weight.detach().double()
    assert abs(float(moved.mean()) - (1 + 2.0**-12)) < 5 * 2.0**-10 / COUNT**0.5
    assert float(moved.std()) > 0


LENGTH = 1000
NOT_ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a result in float32": lambda x: x.float() * 3.1,
    "a conversion of doubles to half": lambda x: (x.double() * 3.1).half(),
    "a conversion to bfloat16": lambda x: (x.float() * 3.1).to(torch.bfloat16),
    "a conversion of exact values": lambda x: x.float().half(),
    "a copy of doubles to half": lambda x: torch.zeros(LENGTH).half().copy_(x.double() * 3.1),
    "a copy to bfloat16": lambda x: torch.zeros(LENGTH).to(torch.bfloat16).copy_(x.float() * 3.1),
    "a copy of half to float32": lambda x: torch.zeros(LENGTH).copy_(x),
    "a copy of exact values": lambda x: torch.zeros(LENGTH).half().copy_(x.float()),
}


@pytest.mark.parametrize("function", NOT_ROUNDED.values(), ids=NOT_ROUNDED)
def test_only_conversions_of_float32_to_half_are_rounded_at_random(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    agrees(function, torch.randn(LENGTH).half(), opts=rounding(), rtol=0, atol=0)


def test_updates_that_half_can_hold_are_exact() -> None:
    weight, _ = trained(rounding(), lr=2.0**-11)

    assert weight.unique().tolist() == [1 - 4 * 2.0**-11]


BETWEEN = 1 + 2.0**-12  # a quarter of the way from 1 to the next number in half
ROUNDED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a conversion": (torch.Tensor.half, (torch.full((COUNT,), BETWEEN),)),
    "a copy": (lambda x: torch.zeros(COUNT).half().copy_(x), (torch.full((COUNT,), BETWEEN),)),
    "a product": (
        torch.matmul,
        (torch.tensor([[1.0, 2.0**-12]]).half(), torch.ones(2, COUNT).half()),
    ),
}


@pytest.mark.spec("precision", 12)
@pytest.mark.parametrize(("function", "inputs"), ROUNDED.values(), ids=ROUNDED)
def test_results_in_half_are_rounded_at_random_to_both_neighbours(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> None:
    rounded = infer(function, *inputs, opts=rounding()).double()

    assert sorted(rounded.unique().tolist()) == [1.0, 1 + 2.0**-10]
    distance = abs(float(rounded.mean()) - BETWEEN)
    assert distance < 5 * 2.0**-10 * (0.25 * 0.75 / COUNT) ** 0.5


@pytest.mark.parametrize(("function", "inputs"), ROUNDED.values(), ids=ROUNDED)
def test_each_call_rounds_with_new_random_numbers(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> None:
    wrapped = poptorch.inferenceModel(Calling(function), rounding())

    first, second = wrapped(*inputs), wrapped(*inputs)

    assert not torch.equal(first, second)


@pytest.mark.parametrize(("function", "inputs"), ROUNDED.values(), ids=ROUNDED)
def test_a_seed_rounds_in_the_same_way_again(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> None:
    first, again = (infer(function, *inputs, opts=rounding()) for _ in range(2))

    assert torch.equal(first, again)


@pytest.mark.spec("precision", 12)
@pytest.mark.parametrize(("function", "inputs"), ROUNDED.values(), ids=ROUNDED)
def test_without_stochastic_rounding_results_in_half_are_the_nearest_numbers(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> None:
    nearest = infer(function, *inputs, opts=rounding(enabled=False))

    assert nearest.unique().tolist() == [1.0]


def test_batch_norms_in_half_train() -> None:
    """Torch says of their running statistics, which are half, that they are float32."""
    close = {"rtol": 0, "atol": relative(4, dtype=torch.half)}
    model = Graded(norm=torch.nn.BatchNorm1d(4)).half()
    pair = EagerPair(model, lambda p: torch.optim.SGD(p, 0.125), rounding(), **close)
    pair.step(torch.randn(8, 4).half(), torch.zeros(8, 4).half(), count=3)
    assert model.norm.running_mean.dtype == torch.half
    pair.compare()
