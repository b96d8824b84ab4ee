"""How many micro-batches run side by side: as many as are fast and worth their memory."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch._compile import lanes

STEPS, ROWS = 16, 4


def program_of(model: nn.Module, columns: int, opts: poptorch.Options) -> poptorch.PoplarExecutor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = poptorch.trainingModel(model, opts, optimizer)
    wrapper.compile(normal(STEPS * ROWS, columns))
    return wrapper


def lanes_of(wrapper: poptorch.PoplarExecutor) -> int:
    side_by_side = wrapper.plan().program.lanes
    return 1 if side_by_side is None else side_by_side.steps


def peak_of(wrapper: poptorch.PoplarExecutor) -> int:
    return max(lanes.peak_bytes(graph) for graph in wrapper.plan().program.graphs.values())


def with_large_values() -> Having:
    """Long kernels: a micro-batch takes as long alone as beside others."""

    def forward(net: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((x * net.factor).sin().exp().tanh(), "mean")

    return Having(forward, factor=nn.Parameter(torch.ones(())))


def with_large_weights() -> Having:
    """Products of few rows: their weights are read from memory once for all lanes."""

    def forward(net: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(net.second(net.first(x).relu()), "mean")

    return Having(forward, first=nn.Linear(256, 512), second=nn.Linear(512, 512))


def test_lanes_that_gain_little_are_given_up_for_their_memory(monkeypatch) -> None:
    usual = program_of(with_large_values(), 4096, options(accumulation=STEPS))
    monkeypatch.setattr(lanes, "SAVED", peak_of(usual) // 3)

    saving = program_of(with_large_values(), 4096, options(accumulation=STEPS))

    assert lanes_of(usual) == STEPS
    assert lanes_of(saving) == STEPS // 4
    assert peak_of(saving) <= lanes.SAVED


def test_lanes_that_share_reading_large_weights_stay(monkeypatch) -> None:
    monkeypatch.setattr(lanes, "SAVED", 1)

    wrapper = program_of(with_large_weights(), 256, options(accumulation=STEPS))

    assert lanes_of(wrapper) == STEPS


@pytest.mark.parametrize("count", [2, STEPS])
def test_lanes_that_the_user_asks_for_stay(count: int, monkeypatch) -> None:
    monkeypatch.setattr(lanes, "SAVED", 1)

    opts = options(accumulation=STEPS).lanes(count)
    wrapper = program_of(with_large_values(), 4096, opts)

    assert lanes_of(wrapper) == count


def test_the_same_numbers_come_out_of_fewer_lanes(monkeypatch) -> None:
    x = normal(STEPS * ROWS, 64)
    usual, saving = with_large_values(), with_large_values()
    many = program_of(usual, 64, options(accumulation=STEPS))
    many(x)
    monkeypatch.setattr(lanes, "SAVED", 1)
    few = program_of(saving, 64, options(accumulation=STEPS))
    few(x)

    torch.testing.assert_close(saving.factor, usual.factor)
