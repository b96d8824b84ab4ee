"""Loss scaling and accumulators in half, through the executor."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options
from poptorch import MeanReductionStrategy, ReductionType

HALF = torch.float16
TINY = 2.0**-26  # half of the smallest half number


class Product(nn.Module):
    """The gradient of its weight is the mean of the input."""

    def __init__(self, dtype=HALF, size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x, scale=1.0):
        return poptorch.identity_loss((self.weight * x).mean() * scale, "none")


def wrap(opts=None, dtype=HALF, **settings):
    model = Product(dtype)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, **settings)
    return model, optimizer, poptorch.trainingModel(model, opts or options(), optimizer)


def weight(model):
    return float(model.weight.detach())


@pytest.mark.spec("precision", 22)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("variable", [False, True])
def test_the_loss_is_not_scaled_and_tiny_gradients_survive(variable, accumulation):
    """With float32 weights and half activations the gradient passes through half."""

    class Narrow(Product):
        def forward(self, x):
            half = self.weight.half() * x.half()
            return poptorch.identity_loss((half.float() * TINY).mean(), "none")

    moved = {}
    for scaling in (1.0, 1024.0):
        model = Narrow(torch.float32)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=1024.0)
        optimizer.loss_scaling = scaling
        if variable:
            optimizer.variable_attrs.markAsVariable("loss_scaling")
        wrapped = poptorch.trainingModel(model, options(accumulation=accumulation), optimizer)
        loss = wrapped(torch.ones(accumulation))
        assert float(loss) == TINY
        moved[scaling] = 1 - weight(model)
    assert moved == {1.0: 0.0, 1024.0: pytest.approx(1024 * TINY)}


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_a_power_of_two_changes_nothing_in_float(name):
    results = []
    for scaling in (1.0, 2.0**10):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        settings = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        made = getattr(poptorch.optim, name)(
            model.parameters(), lr=0.01, loss_scaling=scaling, **settings
        )
        loss = nn.CrossEntropyLoss()

        class Net(nn.Module):
            def __init__(self, model, loss):
                super().__init__()
                self.model, self.loss = model, loss

            def forward(self, x, y):
                return self.loss(self.model(x), y)

        wrapped = poptorch.trainingModel(Net(model, loss), options(accumulation=2), made)
        x, y = torch.randn(8, 3), torch.arange(8) % 2
        losses = [wrapped(x, y) for _ in range(5)]
        results.append((torch.stack(losses), *(p.detach().clone() for p in model.parameters())))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


@pytest.mark.spec("optimizers", 7)
def test_a_variable_scale_may_change_and_a_constant_one_may_not():
    model, optimizer, wrapped = wrap(dtype=torch.float32, loss_scaling=2.0)
    wrapped(torch.ones(1))
    compiled = wrapped._session.now.compiled
    optimizer.loss_scaling = 512.0
    wrapped.setOptimizer(optimizer)
    wrapped(torch.ones(1))
    assert weight(model) == -2.0
    assert wrapped._session.now.compiled is compiled

    model, optimizer, wrapped = wrap(dtype=torch.float32)
    wrapped(torch.ones(1))
    optimizer.loss_scaling = 2.0
    with pytest.raises(poptorch.Error, match="Values are constant but do not match"):
        wrapped.setOptimizer(optimizer)
    optimizer.loss_scaling = 1.0
    wrapped(torch.ones(1))
    assert weight(model) == -2.0


def automatic(**counts):
    opts = options(**counts)
    opts.Training.setAutomaticLossScaling(True)
    return opts


def factor(optimizer):
    return float(optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_automatic_factor_follows_the_gradients(accumulation):
    opts = automatic(accumulation=accumulation)
    opts.anchorTensor("scale", "finalLossScale")
    model, optimizer, wrapped = wrap(opts, loss_scaling=4.0)
    small, large = torch.full((accumulation,), 2.0**-6).half(), torch.full((accumulation,), 600.0)
    scales, factors = [], []
    for x in (small, small, large.half(), large.half(), small):
        wrapped(x)
        scales.append(float(wrapped.getAnchoredTensor("scale").flatten()[-1]))
        factors.append(factor(optimizer))
    # 600 x 16 lies beyond an eighth of the largest half number (8188), and so does 600 x 8 x 2.
    assert factors == [2.0, 4.0, 2.0, 4.0, 8.0]
    assert scales == [4.0, 8.0, 16.0, 8.0, 16.0]
    moved = 3 * 2.0**-6 + 2 * 600
    assert weight(model) == pytest.approx(-moved, rel=1e-3)


def test_the_factor_is_kept_in_checkpoints_and_makes_the_scale_variable():
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


def test_without_half_weights_automatic_scaling_says_that_it_does_nothing(caplog):
    model, optimizer, wrapped = wrap(automatic(), dtype=torch.float32)
    assert float(wrapped(torch.ones(1))) == 0.0
    wrapped(torch.ones(1))
    assert weight(model) == -2.0
    assert caplog.text.count("setAutomaticLossScaling does nothing") == 1
    assert "lossScaleUpdateFactor" not in optimizer.state_dict()["ipu_state"]


def test_automatic_scaling_trains_where_gradients_vanish():
    """A gradient of 2**-26 is zero in half until the factor has grown."""

    class Faint(Product):
        def forward(self, x):
            return poptorch.identity_loss((self.weight * x).float().mean() * TINY, "none")

    moved = {}
    for enabled in (False, True):
        model = Faint(HALF)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0**20)
        opts = automatic() if enabled else options()
        wrapped = poptorch.trainingModel(model, opts, optimizer)
        for _ in range(6):
            before = weight(model)
            assert float(wrapped(torch.ones(1).half())) == pytest.approx(before * TINY, rel=1e-3)
        moved[enabled] = weight(model)
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(-4 * 2.0**20 * TINY, rel=0.3)


@pytest.mark.spec("precision", 15)
def test_accumulators_of_half_weights_are_float_by_default():
    dtypes = {}
    for settings in ({}, {"accum_type": HALF}):
        opts = options(accumulation=4)
        opts.lanes(1)
        model, _, wrapped = wrap(opts, **settings)
        wrapped(torch.ones(4).half())
        slots = wrapped._session.now.compiled.plan.program.state_slots()
        dtypes[len(settings)] = slots["accum.weight"].dtype
        strategy = wrapped.options.Training.meanAccumulationAndReplicationReductionStrategy
        running = bool(settings)
        assert (strategy == MeanReductionStrategy.Running) == running
        assert model.weight.dtype == HALF
        assert weight(model) == -1.0
    assert dtypes == {0: torch.float32, 1: HALF}


def test_a_running_mean_stays_in_range_where_a_sum_overflows():
    results = {}
    for kind in (ReductionType.Mean, ReductionType.Sum):
        opts = options(accumulation=4)
        opts.lanes(1)
        opts.Training.accumulationAndReplicationReductionType(kind)
        model, _, wrapped = wrap(opts, dtype=torch.float32, accum_type=HALF)
        wrapped(torch.tensor([40000.0, 20000.0, 30000.0, 50000.0]))
        results[kind] = weight(model)
    assert results[ReductionType.Mean] == pytest.approx(-35000, rel=1e-3)
    assert results[ReductionType.Sum] == -float("inf")


def test_float_accumulators_keep_what_half_ones_lose():
    moved = {}
    for dtype in (torch.float32, HALF):
        opts = options(accumulation=64)
        opts.lanes(1)
        model, _, wrapped = wrap(opts, dtype=torch.float32, accum_type=dtype)
        x = torch.full((64,), 2.0**-8)
        x[0] = 63.0
        wrapped(x)
        moved[dtype] = -weight(model)
    want = (63 + 63 * 2.0**-8) / 64
    assert moved[torch.float32] == pytest.approx(want, rel=1e-6)
    assert abs(moved[HALF] - want) < 0.02 * want
    assert abs(moved[HALF] - want) > abs(moved[torch.float32] - want)
