"""Stochastic rounding of what an update stores: unbiased, exact where it can be, repeatable."""

import pytest
import torch

from poptorch._update.step import RandomRounding

COUNT = 1 << 16
VALUES = [1.0 + 2.0**-12, -3.3, 1000.1, 2.0**-15 * 1.0001, -(2.0**-25), 6.0e-8, 0.1]


def store(values, counter=0, dtype=torch.float16):
    return RandomRounding(torch.tensor(counter))(values, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unbiased_between_the_two_neighbours(dtype):
    for value in torch.tensor(VALUES):
        got = store(value.expand(COUNT), dtype=dtype).double()
        found, value = got.unique(), float(value)
        assert len(found) <= 2
        assert float(found.min()) <= value <= float(found.max())
        # 5 standard deviations of the mean of COUNT coins that land one step apart
        step = float(found.max() - found.min())
        assert abs(float(got.mean()) - value) <= 5 * 0.5 * step / COUNT**0.5 + 1e-12
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every[~every.isnan()]  # what is representable stays
    assert torch.equal(store(exact.float(), dtype=dtype), exact)
    assert store(torch.tensor([float("nan")]), dtype=dtype).isnan().all()


def test_streams():
    values = torch.full((COUNT,), 1 + 2.0**-11)
    stores = RandomRounding(torch.tensor(7))
    first, second = stores(values, torch.float16), stores(values, torch.float16)
    again, later = store(values, 7), store(values, 8)
    assert torch.equal(first, again)
    drawn = [1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]  # by every version of poptorch
    assert list(map(int, first[:16] > 1)) == drawn
    for other in (second, later):
        share = float((first == other).double().mean())
        assert 0.48 < share < 0.52  # independent coins agree half of the time
    up = (first > 1).double()
    assert abs(float((up[1:] * up[:-1]).mean()) - 0.25) < 0.01  # so do neighbours
