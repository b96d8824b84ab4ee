"""Calls like earlier ones: what is created is what torch would have derived, also with symbols."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from poptorch._ir.conditions import expression
from poptorch._ir.slots import Kind, Slot
from poptorch._ir.symbolic import Symbols

aten = torch.ops.aten
Call = Callable[[torch.Tensor], Any]

CALLS: dict[str, Call] = {
    "a matrix product": lambda x: aten.bmm.default(x, aten.transpose.int(x, 1, 2)),
    "a sum of columns": lambda x: aten.sum.dim_IntList(x, [2]),
    "a view of joined rows": lambda x: aten.view.default(x, [-1, 6]),
    "a view with a symbolic size": lambda x: aten.view.default(x, [x.shape[1] * 3, 8]),
    "a part": lambda x: aten.slice.Tensor(x, 2, 1, 5, 2),
    "a part that ends at half of a size": lambda x: aten.slice.Tensor(x, 1, 1, x.shape[1] // 2),
    "one element of a dimension": lambda x: aten.select.int(x, 2, 3),
    "another order of dimensions": lambda x: aten.permute.default(x, [2, 0, 1]),
    "an expanded value": lambda x: aten.expand.default(x, [3, 4, x.shape[1], 6]),
    "several parts": lambda x: aten.split.Tensor(x, 2, 2),
    "several results": lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    "another type": lambda x: aten._to_copy.default(x, dtype=torch.float64),
    "a view as complex numbers": lambda x: aten.view_as_complex.default(
        aten.view.default(x, [4, x.shape[1], 3, 2])
    ),
    "a view as other integers": lambda x: aten.view.dtype(x, torch.int32),
    "a comparison": lambda x: aten.gt.Scalar(x, 0),
    "zeros of the same shape": lambda x: aten.zeros_like.default(x),
}


def symbols() -> tuple[Symbols, torch.Tensor]:
    """Symbols, and a tensor of shape (4, length, 6)."""
    made = Symbols({"length": 10})
    slot = Slot(Kind.BATCH, (4, 10, 6), torch.float32, symbols=("", "length", ""))
    return made, made.tensor(slot)


def call(made: Symbols, function: Call, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The results of a function."""
    with torch.no_grad(), made.mode:
        found = function(x)
    return found if isinstance(found, list | tuple) else [found]


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The type, shape, strides, offset and size of the memory of a tensor."""
    sizes = *tensor.shape, *tensor.stride(), tensor.storage_offset()
    memory = tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.dim(), *map(expression, sizes), expression(memory)


def memories(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> list[int]:
    """For ``x`` and each tensor, the position of the first one that has the same memory."""
    identities = [each.untyped_storage()._cdata for each in (x, *tensors)]
    return [identities.index(each) for each in identities]


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_a_repeated_call_has_the_layouts_that_torch_derives(function: Call) -> None:
    made, x = symbols()

    first, again = call(made, function, x), call(made, function, x)

    assert [*map(layout, again)] == [*map(layout, first)]


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_results_of_a_repeated_call_share_the_memory_that_torchs_share(function: Call) -> None:
    made, x = symbols()

    first, again = call(made, function, x), call(made, function, x)

    assert memories(again, x) == memories(first, x)


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_a_repeated_call_assumes_nothing_more_about_sizes(function: Call) -> None:
    made, x = symbols()
    call(made, function, x)
    before = made.conditions

    call(made, function, x)

    assert made.conditions == before


def test_results_of_two_equal_calls_have_separate_memory() -> None:
    made, x = symbols()
    (first,) = call(made, CALLS["a comparison"], x)

    (again,) = call(made, CALLS["a comparison"], x)

    assert again.untyped_storage()._cdata != first.untyped_storage()._cdata


def test_a_view_of_another_tensor_has_the_memory_of_that_tensor() -> None:
    made, x = symbols()
    (other,) = call(made, torch.ops.aten.clone.default, x)
    call(made, CALLS["a part"], x)

    (part,) = call(made, CALLS["a part"], other)

    assert part.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_a_call_on_another_size_is_not_a_repeated_one() -> None:
    made = Symbols({"length": 10, "width": 14})
    sizes = [("", "length", ""), ("", "width", "")]
    one, other = (
        made.tensor(Slot(Kind.BATCH, (4, size, 6), torch.float32, symbols=names))
        for size, names in zip((10, 14), sizes, strict=True)
    )
    call(made, CALLS["a sum of columns"], one)

    (found,) = call(made, CALLS["a sum of columns"], other)

    assert expression(found.shape[1]) == expression(other.shape[1])
