"""Products of groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import options

GROUPS, LONG, WIDE, OUT = 3, 8, 4, 8
SHAPES = {
    "rows": ((LONG, WIDE), (GROUPS, WIDE, OUT)),
    "columns": ((GROUPS, WIDE, OUT), (OUT, LONG)),
    "inner": ((WIDE, LONG), (LONG, OUT)),
}


class Grouped(nn.Module):
    def __init__(self, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes)

    def forward(self, ends: torch.Tensor):
        y = F.grouped_mm(self.a, self.b, offs=ends.flatten())
        return y, poptorch.identity_loss(y.sin(), reduction="sum")


def by_hand(net: Grouped, ends: list[int]) -> torch.Tensor:
    a, b = net.a, net.b
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        return torch.cat([a[part] @ b[at] for at, part in enumerate(parts)])
    return torch.cat([a[at] @ b[:, part] for at, part in enumerate(parts)], 1)


CASES = [
    *((what, torch.float32, "reference") for what in SHAPES),
    ("rows", torch.float64, "reference"),
]
COMPILED = pytest.param("rows", torch.float32, "inductor", marks=pytest.mark.slow)


@pytest.mark.parametrize("what, dtype, backend", [*CASES, COMPILED])
def test_groups_have_matrices_of_their_own(what: str, dtype: torch.dtype, backend: str) -> None:
    net, twin = Grouped(SHAPES[what], dtype), Grouped(SHAPES[what], dtype)
    twin.load_state_dict(net.state_dict())
    given = options().backend(backend)
    given.Precision.narrow64Bit(False)
    model = poptorch.trainingModel(net, given, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for ends in ([2, 5, LONG], [0, LONG, LONG]):  # the second leaves groups without anything
        expected = by_hand(twin, ends)
        got, _ = model(torch.tensor([ends], dtype=torch.int32))
        torch.testing.assert_close(got, expected.detach())
        plain.zero_grad()
        expected.sin().sum().backward()
        plain.step()
    model.copyWeightsToHost()
    torch.testing.assert_close(net.a, twin.a)
    torch.testing.assert_close(net.b, twin.b)


def test_rows_of_no_group_are_zero_and_micro_batches_have_their_own_groups() -> None:
    class Product(nn.Module):
        def forward(self, a, b, ends):
            return F.grouped_mm(a, b[0], offs=ends[0])

    a, b = torch.randn(8, 4), torch.randn(2, 3, 4, 8)
    ends = torch.tensor([[1, 2, 3], [0, 4, 4]], dtype=torch.int32)
    got = poptorch.inferenceModel(Product(), options().deviceIterations(2))(a, b, ends)
    first = torch.stack([a[0] @ b[0, 0], a[1] @ b[0, 1], a[2] @ b[0, 2], torch.zeros(8)])
    torch.testing.assert_close(got, torch.cat([first, a[4:] @ b[1, 1]]))


REFUSED = {
    "two types": ((8, 8), (1, 8, 8), 1, torch.float16, "BF16"),
    "both of three dimensions": ((1, 8, 8), (1, 8, 8), 1, torch.float32, "BF16|offs"),
    "other inner sizes": ((8, 8), (1, 4, 8), 1, torch.float32, "do not fit together"),
    "other numbers of groups": ((8, 8), (2, 8, 8), 1, torch.float32, "do not fit together"),
}


@pytest.mark.parametrize("a, b, groups, dtype, said", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused(a, b, groups: int, dtype: torch.dtype, said: str) -> None:
    class Product(nn.Module):
        def forward(self, a, b, ends):
            return F.grouped_mm(a, b, offs=ends)

    given = torch.randn(a), torch.randn(b).to(dtype), torch.full((groups,), 8, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        F.grouped_mm(given[0], given[1], offs=given[2])
    with pytest.raises((RuntimeError, poptorch.Error), match=said):
        poptorch.inferenceModel(Product())(*given)
