"""Strides of indices are what torch's own function finds, without asking it for sums."""

from __future__ import annotations

import pytest
import sympy
from torch._inductor.sizevars import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from poptorch.backends.inductor.shortcuts import stride

pytestmark = pytest.mark.slow  # to import the compiler takes seconds
D0, D1, S0 = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("d0", "d1", "s0"))
SUMS = [
    (D0, 1),
    (784 * D1 + D0, 1),
    (32400 * D0 + 144 * D1 + 16, 32400),
    (3 * D0 + 2 * (D0 + D1), 5),
    (D1 - 1, 0),
    (FloorDiv(D1, 4) + 7 * D0, 7),
    (-D0 + 9, -1),
    (sympy.Integer(5), 0),
]
OTHERS = [
    FloorDiv(D0, 4) + 3 * D1,
    ModularIndexing(D0, 1, 16) + 2 * D0,
    S0 * D0 + D1,
    D0 * D1,
    FloorDiv(D0, 32) + D0,
]


def refuse(*arguments: object) -> None:
    raise AssertionError(f"torch was asked: {arguments}")


@pytest.mark.parametrize(("index", "wanted"), SUMS)
@pytest.mark.parametrize("length", [None, 16])
def test_sums_of_variables_times_numbers(index, wanted: int, length: int | None) -> None:
    assert stride(refuse, index, D0, length) == wanted
    assert stride_at_vec_range(index, D0, length) == wanted


@pytest.mark.parametrize("index", OTHERS)
def test_all_else_is_left_to_torch(index) -> None:
    asked = []
    assert stride(lambda *a: asked.append(a) or "torch's", index, D0, 16) == "torch's"
    assert asked == [(index, D0, 16)]
