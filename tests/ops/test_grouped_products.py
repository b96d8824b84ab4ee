"""``torch.nn.functional.grouped_mm``: products of groups of rows, each with its own matrix."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having, infer, options, trains_alike, unchecked

GROUPS, LONG, WIDE, OUT = 3, 8, 4, 8
# By what is divided into groups: the shapes of both operands.
OPERANDS = {
    "rows": ((LONG, WIDE), (GROUPS, WIDE, OUT)),
    "columns": ((GROUPS, WIDE, OUT), (OUT, LONG)),
    "inner": ((WIDE, LONG), (LONG, OUT)),
}


def by_hand(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the products of groups that end at some places."""
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        return torch.cat([a[part] @ b[at] for at, part in enumerate(parts)])
    return torch.cat([a[at] @ b[:, part] for at, part in enumerate(parts)], 1)


@pytest.mark.parametrize(
    "what, dtype", [*((what, torch.float32) for what in OPERANDS), ("rows", torch.float64)]
)
@pytest.mark.parametrize("ends", [[2, 5, LONG], [0, LONG, LONG]], ids=["all", "empty groups"])
def test_each_group_has_its_own_matrix(what: str, dtype: torch.dtype, ends: list[int]) -> None:
    a, b = (nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in OPERANDS[what])
    opts = options()
    opts.Precision.narrow64Bit(False)

    def model(product: Callable[..., torch.Tensor]) -> Having:
        def forward(model: Having, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = product(model.a, model.b, given)
            return y, poptorch.identity_loss(y.sin(), reduction="sum")

        return copy.deepcopy(Having(forward, a=a, b=b))

    grouped = model(lambda a, b, given: F.grouped_mm(a, b, offs=given[0]))
    eager = model(lambda a, b, _: by_hand(a, b, ends))

    trains_alike(grouped, torch.tensor([ends], dtype=torch.int32), eager=eager, opts=opts)


def test_micro_batches_have_their_own_groups_and_rows_of_no_group_are_zero() -> None:
    """In eager PyTorch, rows of no group contain uninitialised memory."""
    a, b = torch.randn(8, 4), torch.randn(2, 3, 4, 8)
    ends = torch.tensor([[1, 2, 3], [0, 4, 4]], dtype=torch.int32)

    got = infer(
        lambda a, b, ends: F.grouped_mm(a, b[0], offs=ends[0]),
        a,
        b,
        ends,
        opts=unchecked(iterations=2),
    )

    first = torch.stack([a[0] @ b[0, 0], a[1] @ b[0, 1], a[2] @ b[0, 2], torch.zeros(8)])
    second = a[4:] @ b[1, 1]
    torch.testing.assert_close(got, torch.cat([first, second]))


NO_MATCH = "shapes of the operands do not match"
MISFITS = {
    "two types": ((8, 8), (1, 8, 8), 1, torch.float16, "BF16|BFloat16|same dtype"),
    "both of three dimensions": ((1, 8, 8), (1, 8, 8), 1, torch.float32, "BF16|offs"),
    "other inner sizes": ((8, 8), (1, 4, 8), 1, torch.float32, NO_MATCH),
    "other numbers of groups": ((8, 8), (2, 8, 8), 1, torch.float32, NO_MATCH),
}


@pytest.mark.parametrize("a, b, groups, dtype, message", MISFITS.values(), ids=MISFITS)
def test_operands_that_torch_refuses_are_refused(
    a: tuple[int, ...], b: tuple[int, ...], groups: int, dtype: torch.dtype, message: str
) -> None:
    left, right = torch.randn(a), torch.randn(b).to(dtype)
    ends = torch.full((groups,), 8, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        F.grouped_mm(left, right, offs=ends)

    with pytest.raises((RuntimeError, poptorch.Error), match=message):
        infer(lambda a, b, ends: F.grouped_mm(a, b, offs=ends), left, right, ends)
