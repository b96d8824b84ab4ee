"""Code for all sizes adds up few values and many."""

import pytest
import torch

import poptorch
from helpers.closeness import near
from helpers.wrapping import Having, normal, options
from poptorch._compile import tiers

pytestmark = pytest.mark.slow


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> poptorch.PoplarExecutor:
    """Return a model that adds up 64 values for each row, with code for all numbers of rows."""
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)
    module = Having(lambda _, x: (x.square().sum(), x.sum(0)))
    model = poptorch.inferenceModel(module, options("inductor").programs(2))
    for rows in (40, 100):
        model(normal(rows, 64))
    return model


@pytest.mark.parametrize("rows", [2, 60, 70, 1000])
def test_one_code_adds_up_few_values_and_many(model: poptorch.PoplarExecutor, rows: int) -> None:
    x = normal(rows, 64)
    total, of_columns = model(x)

    torch.testing.assert_close(total, x.square().sum())
    torch.testing.assert_close(of_columns, x.sum(0), **near(rows, size=float(x.abs().max())))
    (ranges,) = model._executable._code.ranges.values()
    assert len(ranges.all()) == 1
