"""Accumulation, means and sums, loss scaling: numbers of micro-batches against one large batch."""

import pytest
import torch

import poptorch.optim
from helpers.updating import Training, Workload, frozen, zeros
from poptorch._ir.slots import BEYOND_EDGE, LOSS_SCALE_FACTOR, param
from poptorch._ir.slots import gradient as gradient_of
from poptorch._ir.spec import Reduction
from poptorch._update import Accumulation
from poptorch.enums import MeanReductionStrategy, ReductionType

FACTOR = LOSS_SCALE_FACTOR.key
HALF_MAX = torch.finfo(torch.float16).max
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "LAMB": {"lr": 0.01},
}


def gradient_slot(name, shape, dtype):
    return gradient_of(param(name, shape, dtype))


def one(dtype=torch.float32, shape=(), **settings):
    """A spec of SGD for one weight, and the slot of its gradient."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = poptorch.optim.SGD([parameter], lr=0.1, **settings)
    spec, values = frozen(optimizer, {"w": parameter})
    return spec, [gradient_slot("w", shape, dtype)], values


def run(accumulation, slots, gradients, hypers=None):
    """Feed chunks of gradients (each a dict) through accumulate and finish; return the tensors."""
    add, end = accumulation.accumulate(slots), accumulation.finish(slots)
    tensors = zeros(add) | zeros(end) | dict(hypers or {})
    for micro, chunk in enumerate(gradients):
        tensors |= {f"gradient.{n}": g for n, g in chunk.items()}
        tensors["counter.micro"] = torch.tensor(float(micro))
        tensors |= add.function({slot.key: tensors[slot.key] for slot in add.inputs})
    return tensors | end.function({slot.key: tensors[slot.key] for slot in end.inputs})


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", MeanReductionStrategy)
@pytest.mark.parametrize("kind", [ReductionType.Mean, ReductionType.Sum])
@pytest.mark.parametrize("lanes", [1, 2])
def test_eight_micro_batches_of_four_equal_one_batch_of_32(name, strategy, kind, lanes):
    work = Workload("perceptron")
    whole = work.gradients()
    pieces = []
    inputs, labels = work.inputs, work.labels
    for at in range(0, 32, 4):
        work.inputs, work.labels = inputs[at : at + 4], labels[at : at + 4]
        pieces.append(work.gradients())
    chunks = [
        {n: sum(p[n] for p in pieces[at : at + lanes]).float() for n in whole}
        for at in range(0, 8, lanes)
    ]
    parameters = work.single()
    make = getattr(poptorch.optim, name)
    ours = Training(make(parameters.values(), **OPTIMIZERS[name]), parameters, torch.float32)
    slots = [gradient_slot(n, tuple(g.shape), torch.float32) for n, g in whole.items()]
    reduction = Reduction(kind, strategy)
    got = run(Accumulation(ours.spec, reduction, lanes, chunks=8 // lanes), slots, chunks)
    factor = 8 if kind is ReductionType.Sum else 1
    want = {n: factor * g.float() for n, g in whole.items()}
    for n, gradient in want.items():
        torch.testing.assert_close(got[f"gradient.{n}"], gradient, rtol=2e-5, atol=1e-6)
        assert not got[f"accum.{n}"].any()
    once = Training(make(parameters.values(), **OPTIMIZERS[name]), parameters, torch.float32)
    ours.step({n: got[f"gradient.{n}"] for n in want})
    once.step(want)
    for n in want:
        torch.testing.assert_close(ours.weight(n), once.weight(n), rtol=1e-4, atol=2e-5)


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize("strategy", MeanReductionStrategy)
def test_identical_micro_batches(strategy):
    spec, slots, _ = one()
    for kind, expected in ((ReductionType.Mean, 1.5), (ReductionType.Sum, 7.5)):
        accumulation = Accumulation(spec, Reduction(kind, strategy), chunks=5)
        got = run(accumulation, slots, [{"w": torch.tensor(1.5)}] * 5)
        assert float(got["gradient.w"]) == pytest.approx(expected)


@pytest.mark.parametrize("strategy", MeanReductionStrategy)
def test_replicas_that_are_summed_between(strategy):
    spec, slots, _ = one()
    made = Accumulation(spec, Reduction(strategy=strategy), chunks=2, summed=2, replicas=2)
    add, end = made.accumulate(slots), made.finish(slots)
    total = torch.tensor(0.0)
    for replica in range(2):
        tensors = zeros(add)
        for micro in range(2):
            tensors["gradient.w"] = torch.tensor(1.0 + 2 * replica + micro)
            tensors["counter.micro"] = torch.tensor(float(micro))
            tensors |= add.function(tensors)
        total = total + tensors["accum.w"]
    got = end.function({"accum.w": total})
    assert float(got["gradient.w"]) == pytest.approx((1 + 2 + 3 + 4) / 4)


def test_running_stays_in_range_in_half_where_post_overflows():
    spec, slots, _ = one(torch.float16, accum_type=torch.float16)
    gradients = [{"w": torch.tensor(40000.0, dtype=torch.float16)}] * 4
    post = run(Accumulation(spec, Reduction(), chunks=4), slots, gradients)
    reduction = Reduction(strategy=MeanReductionStrategy.Running)
    running = run(Accumulation(spec, reduction, chunks=4), slots, gradients)
    assert post["accum.w"].dtype == torch.float16
    assert post["gradient.w"].isinf()
    assert float(running["gradient.w"]) == 40000.0


def test_float_accumulators_keep_what_half_loses():
    small = {"w": torch.tensor(2.0**-12, dtype=torch.float16)}
    gradients = [{"w": torch.tensor(1.0, dtype=torch.float16)}, *[small] * 4096]
    found = {}
    for dtype in (torch.float16, torch.float32):
        spec, slots, _ = one(torch.float16, accum_type=dtype)
        accumulation = Accumulation(spec, Reduction(ReductionType.Sum), chunks=4097)
        sums = run(accumulation, slots, gradients)
        found[dtype] = float(sums["gradient.w"])
    assert found == {torch.float16: 1.0, torch.float32: 2.0}


def test_combined_sgd_adds_gradients_already_divided():
    spec, slots, _ = one(torch.float16, use_combined_accum=True, accum_type=torch.float16)
    gradients = [{"w": torch.tensor(40000.0, dtype=torch.float16)}] * 4
    got = run(Accumulation(spec, Reduction(), chunks=4), slots, gradients)
    assert float(got["gradient.w"]) == 40000.0


def test_nothing_to_scale():
    spec, slots, _ = one()
    assert not Accumulation(spec, Reduction()).scales(slots)
    assert not Accumulation(spec, Reduction(ReductionType.Sum), lanes=4).scales(slots)


@pytest.mark.spec("optimizers", 7)
def test_loss_scaling_is_an_input_and_is_divided_out():
    spec, slots, values = one(loss_scaling=8.0)
    assert values == {"hyper.loss_scaling": 8.0, "hyper.0.lr": 0.1}
    accumulation = Accumulation(spec, Reduction(), lanes=4)
    assert accumulation.scales(slots)
    piece = accumulation.scale(slots)
    given = {"gradient.w": torch.tensor(1.0), "hyper.loss_scaling": torch.tensor(8.0)}
    assert float(piece.function(given)["gradient.w"]) == 1 / 32
    given["hyper.loss_scaling"] = torch.tensor(2.0)
    assert float(piece.function(given)["gradient.w"]) == 1 / 8


@pytest.mark.parametrize("constant", [True, False])
def test_descaling_widens_first(constant):
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = poptorch.optim.SGD([parameter], lr=0.1, loss_scaling=2.0**20)
    if constant:
        optimizer.variable_attrs.markAsConstant("loss_scaling")
    spec, values = frozen(optimizer, {"w": parameter})
    slots = [gradient_slot("w", (), torch.float16)]
    assert Accumulation(spec, Reduction()).scales(slots)
    piece = Accumulation(spec, Reduction()).scale(slots)
    given = {"gradient.w": torch.tensor(2.0**-6, dtype=torch.float16)}
    given |= {key: torch.tensor(value) for key, value in values.items()}
    got = piece.function({slot.key: given[slot.key] for slot in piece.inputs})["gradient.w"]
    assert got.dtype == torch.float32
    assert float(got) == 2.0**-26  # far below what half can hold


class TestAutomaticLossScaling:
    reduction = Reduction(automatic_loss_scaling=True)

    def piece(self, dtype=torch.float16):
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = poptorch.optim.SGD([parameter], lr=0.1)
        spec, _ = frozen(optimizer, {"w": parameter})
        accumulation, slots = Accumulation(spec, self.reduction), [gradient_slot("w", (4,), dtype)]
        return accumulation.scale(slots) if accumulation.scales(slots) else None

    def step(self, value, factor=4.0):
        gradient = torch.tensor([value, 0, 0, 0], dtype=torch.float16)
        got = self.piece().function({"gradient.w": gradient, FACTOR: torch.tensor(factor)})
        assert float(got["gradient.w"][0]) == float(gradient[0]) / factor
        return float(got[FACTOR])

    def test_the_factor_doubles_and_halves(self):
        assert self.step(1.0) == 8.0
        assert self.step(HALF_MAX / 8) == 8.0
        assert self.step(HALF_MAX / 7) == 2.0
        assert self.step(float("inf")) == 2.0

    def test_the_factor_is_bounded(self):
        assert self.step(1.0, 2.0**24) == 2.0**24
        assert self.step(HALF_MAX, 2.0**-24) == 2.0**-24

    def test_it_starts_at_one_and_needs_half_gradients(self):
        assert self.piece().initial == {FACTOR: 1.0}
        assert self.piece(torch.float32) is None

    def test_one_large_micro_gradient_halves_the_factor(self):
        spec, slots, _ = one(torch.float16)
        chunk = {"w": torch.tensor(1.0, dtype=torch.float16)}
        large = {"w": torch.tensor(HALF_MAX, dtype=torch.float16)}
        accumulation = Accumulation(spec, self.reduction, chunks=3)
        calm = run(accumulation, slots, [chunk] * 3)
        wild = run(accumulation, slots, [chunk, large, chunk])
        assert (float(calm[FACTOR]), float(wild[FACTOR])) == (
            2.0,
            0.5,
        )
        assert float(wild[BEYOND_EDGE.key]) == 0.0
