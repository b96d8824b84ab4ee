"""Types in lanes: a number without dimensions counts as little as it does in one micro-batch."""

from collections.abc import Callable

import pytest
import torch

from helpers.captures import capture
from helpers.wrapping import Calling
from poptorch._ir.micro_batches import Lanes
from poptorch._ir.slots import Kind
from poptorch._lanes import NotVectorisable, side_by_side

COUNT = 3
aten = torch.ops.aten
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool)
FUNCTIONS = {
    "where": lambda x, n: aten.where.self(x > 1, x, n),
    "where, the other way": lambda x, n: aten.where.self(x > 1, n, x),
    "clamp": lambda x, n: aten.clamp.Tensor(x, None, n),
    "clamp, twice": lambda x, n: aten.clamp.Tensor(x, n, n),
    "add": aten.add.Tensor,
    "add, to the number": lambda x, n: aten.add.Tensor(n, x),
    "mul": aten.mul.Tensor,
    "mul, the number": lambda x, n: aten.mul.Tensor(n, x),
    "div": aten.div.Tensor,
    "maximum": aten.maximum.default,
    "atan2": aten.atan2.default,
    "remainder": aten.remainder.Tensor,
    "compare": aten.lt.Tensor,
    "equal": aten.eq.Tensor,
    "addcmul": lambda x, n: aten.addcmul.default(x, n, x),
    "a shared tensor": lambda x, n: torch.mul(n, torch.tensor([0.3, 0.7], dtype=torch.bfloat16)),
    "a shared number": lambda x, n: aten.add.Tensor(n, torch.tensor(3, dtype=torch.int64)),
    "two numbers": lambda x, n: aten.mul.Tensor(aten.select.int(x, 0, 0), n),
}


def values(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn > 1.5 if dtype is torch.bool else drawn.to(dtype)


TypeAndShape = tuple[torch.dtype, tuple[int, ...]]


def in_lanes_and_alone(
    function: Callable[..., torch.Tensor], kinds: tuple[TypeAndShape, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what lanes and micro-batches alone compute; None where torch refuses the types.

    Args:
        function: of tensors.
        kinds: type and shape of each of them.
    """
    rows = [
        [values(dtype, *shape, seed=2 * lane + at) for at, (dtype, shape) in enumerate(kinds)]
        for lane in range(COUNT)
    ]
    try:
        alone = [function(*row) for row in rows]
    except RuntimeError:
        return None
    micro = capture(Calling(function), *rows[0])
    graph = side_by_side(micro.graph, Lanes(COUNT))
    stacked = {
        slot.key: torch.stack([row[slot.index] for row in rows])
        for slot in graph.inputs
        if slot.kind is Kind.BATCH
    }
    (found,) = graph({**micro.constants, **stacked}).values()
    return found, torch.stack(alone)


@pytest.mark.slow
@pytest.mark.parametrize("of_values", TYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_of_each_micro_batch_does_not_change_the_type_of_a_result(
    name: str, of_values: torch.dtype
) -> None:
    for of_number in TYPES:
        kinds = (of_values, (2,)), (of_number, ())

        results = in_lanes_and_alone(FUNCTIONS[name], kinds)

        if results is not None:
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_micro_batches_run_one_after_another_where_lanes_would_have_another_type() -> None:
    wide = capture(Calling(lambda x: x + 1), torch.ones(2))
    (node,) = wide.graph.operators
    node.meta["val"] = node.meta["val"].to(torch.int32)

    with pytest.raises(NotVectorisable, match=r"aten.add.Tensor: side by side, its result is"):
        side_by_side(wide.graph, Lanes(COUNT))
