"""Stochastic rounding: unbiased, exact where it can be, the same for the same counter."""

import pytest
import torch

import poptorch.optim
from helpers.updating import Training
from poptorch._ir.slots import ROUNDING
from poptorch._update import lower
from poptorch._update.step import RandomRounding

COUNT = 1 << 16
VALUES = [1.0 + 2.0**-12, -3.3, 1000.1, 2.0**-15 * 1.0001, -(2.0**-25), 6.0e-8, 0.1]


def store(values, counter=0, dtype=torch.float16):
    return RandomRounding(torch.tensor(counter))(values, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", VALUES)
def test_unbiased_between_the_two_neighbours(value, dtype):
    got = store(torch.full((COUNT,), value), dtype=dtype).double()
    found = got.unique()
    assert len(found) <= 2
    step = float(found.max() - found.min())
    value = float(torch.tensor(value))
    assert float(found.min()) <= value <= float(found.max())
    # 5 standard deviations of the mean of COUNT coins that land one step apart
    assert abs(float(got.mean()) - value) <= 5 * 0.5 * step / COUNT**0.5 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_representable_values_stay(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every[~every.isnan()]
    assert torch.equal(store(exact.float(), dtype=dtype), exact)
    assert store(torch.tensor([float("nan")]), dtype=dtype).isnan().all()


def test_streams():
    values = torch.full((COUNT,), 1 + 2.0**-11)
    stores = RandomRounding(torch.tensor(7))
    first, second = stores(values, torch.float16), stores(values, torch.float16)
    again, later = store(values, 7), store(values, 8)
    assert torch.equal(first, again)
    for other in (second, later):
        share = float((first == other).double().mean())
        assert 0.48 < share < 0.52  # independent coins agree half of the time
    up = (first > 1).double()
    assert abs(float((up[1:] * up[:-1]).mean()) - 0.25) < 0.01  # so do neighbours


def test_float_and_nearest_are_untouched():
    values = torch.full((8,), 1 + 2.0**-12)
    assert store(values, dtype=torch.float32) is values
    assert RandomRounding(None)(values, torch.float16).tolist() == [1.0] * 8


@pytest.mark.parametrize("stochastic", [True, False])
def test_half_weights_move_although_every_step_is_too_small(stochastic):
    weight = torch.nn.Parameter(torch.ones(4096).half())
    ours = Training(poptorch.optim.SGD([weight], lr=2.0**-15), {"w": weight})
    slots = [slot for slot in ours.piece.outputs if slot.kind == "param"]
    ours.piece = lower(ours.spec, slots, stochastic_rounding=stochastic)
    assert (ROUNDING in ours.piece.outputs) == stochastic
    ours.tensors[ROUNDING.key] = torch.tensor(3)
    for _ in range(64):
        ours.step({"w": torch.ones(4096).half()})
    mean = float(ours.weight("w").double().mean())
    assert mean == pytest.approx(1 - 64 * 2.0**-15, abs=1e-4 if stochastic else 1e-2)
    assert (mean == 1.0) == (not stochastic)
    assert int(ours.tensors[ROUNDING.key]) == (3 + 64 if stochastic else 3)


def test_single_precision_programs_need_no_counter():
    weight = torch.nn.Parameter(torch.ones(3))
    ours = Training(poptorch.optim.Adam([weight]), {"w": weight})
    slots = [slot for slot in ours.piece.outputs if slot.kind == "param"]
    assert ROUNDING not in lower(ours.spec, slots, stochastic_rounding=True).inputs
