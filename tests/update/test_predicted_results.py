"""Results that a step's functions would have for other shapes are predicted as torch makes them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from poptorch._update.likeness import WholeReads
from poptorch._update.number_tracing import Numbers
from poptorch._update.repeated_operators import Repeats
from poptorch._update.step_values import Geometry, geometry_of
from poptorch._update.traced_step_discovery import _without_values, answering
from poptorch._update.value_origins import WEIGHT

SHAPES = [
    shape
    for dims in range(4)
    for shape in itertools.product((0, 1, 2, 3, 7), repeat=dims)
    if dims < 3 or math.prod(shape) in (0, 2, 12, 42)
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "norm": lambda x: x.norm(),
    "norm of order 2": lambda x: x.norm(2),
    "norm of order 1 of rows": lambda x: x.norm(1, dim=-1, keepdim=True),
    "norm of columns": lambda x: torch.norm(x, dim=-2, keepdim=True),
    "norm of rows without dimension": lambda x: torch.norm(x, dim=-1),
    "norm of dimensions": lambda x: torch.linalg.vector_norm(x, dim=(0, 1), keepdim=True),
    "norm in float64": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(-1, keepdim=True),
    "mean of columns": lambda x: x.mean(dim=0),
    "mean of the middle": lambda x: x.mean(1, True),
    "sum": lambda x: x.sum(),
    "sum in float32": lambda x: x.sum(0, True, dtype=torch.float32),
    "greatest": lambda x: x.abs().amax(),
    "greatest of rows": lambda x: x.amax(-1, keepdim=True),
    "least and sign": lambda x: x.amin(0, True).sign(),
    "squeezed": lambda x: x.squeeze(),
    "doubled": lambda x: x.mul(2.0),
    "zeros": lambda x: x.new_zeros([*x.shape[:-1], 1]),
    "ones": lambda x: x.new_ones((*x.shape, 2)),
    "three zeros": lambda x: x.new_zeros(3, 2),
    "zeros of another type": lambda x: x.new_zeros([2], dtype=torch.int32),
}


def outcome(function: Function, tensor: Tensor) -> Geometry | str:
    """Return what is known about a function's result, or its exception."""
    try:
        return geometry_of(function(tensor))
    except (RuntimeError, IndexError) as error:
        return type(error).__name__


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_torch_for_many_shapes(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    numbers = Numbers(lambda *_: True)
    with torch.no_grad(), _without_values() as mode:
        wholes = WholeReads(numbers.origins)
        repeats = numbers.memo = Repeats(mode, wholes)
        with answering(wholes.answer), numbers:
            found: dict[Any, Any] = {}
            for shape in (*SHAPES, *SHAPES[::-1]):
                weight = repeats.fresh(shape, dtype)
                numbers.origins.enter(weight, f"weight {shape}", (WEIGHT, str(shape)))
                found[shape] = outcome(function, weight)
        want = {shape: outcome(function, torch.empty(shape, dtype=dtype)) for shape in SHAPES}

    assert found == want


def test_reductions_are_computed_for_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    usual = Repeats._computed

    def counting(self: Repeats, *call: Any) -> Any:
        computed.append(call)
        return usual(self, *call)

    monkeypatch.setattr(Repeats, "_computed", counting)
    numbers = Numbers(lambda *_: True)
    with torch.no_grad(), _without_values() as mode:
        wholes = WholeReads(numbers.origins)
        repeats = numbers.memo = Repeats(mode, wholes)
        with answering(wholes.answer), numbers:
            for at in range(2, 6):
                weight = repeats.fresh((at, 7), torch.float32)
                numbers.origins.enter(weight, f"weight {at}", (WEIGHT, str(at)))
                weight.norm(dim=-1, keepdim=True)

    assert len(computed) == 1
    assert wholes.paths == {"2", "3", "4", "5"}
