"""What ``forward`` leaves in attributes while it is captured: no tensors without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options


class Keeping(nn.Module):
    """Makes a table when it is first called, and keeps it with what it returned last."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.ready, self.table, self.outputs, self.fails = False, None, [], fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready, self.table = True, torch.arange(3).float()
        out = x * self.table
        self.outputs.append(out)
        if self.fails:
            raise ValueError("of the user")
        return out


def unchecked(layer: nn.Module, **settings: Any) -> poptorch.PoplarExecutor:
    model = Having(lambda self, x: self.layer(x), layer=layer)
    opts = options().checkAgainstEager("off")
    for name, value in settings.items():
        getattr(opts, name)(value)
    return poptorch.inferenceModel(model, opts)


def test_an_unchecked_capture_puts_back_attributes_that_would_have_no_values() -> None:
    layer = Keeping()

    unchecked(layer)(torch.ones(2, 3))

    assert layer.ready is False
    assert layer.table is None
    assert layer.outputs == []


def test_a_table_that_forward_makes_once_serves_programs_of_two_shapes() -> None:
    wrapped = unchecked(Keeping(), programs=2)
    wrapped(torch.ones(2, 3))

    out = wrapped(torch.ones(4, 3))

    assert torch.equal(out, torch.arange(3.0).expand(4, 3))


def test_attributes_are_as_before_when_forward_fails() -> None:
    layer = Keeping(fails=True)

    with pytest.raises(ValueError, match="of the user"):
        unchecked(layer)(torch.ones(2, 3))

    assert not layer.ready


def test_forward_that_branches_on_values_changes_attributes_once() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * 2 if x.sum() > 0 else x

    layer = Counting()
    wrapped = unchecked(layer)

    wrapped(torch.ones(2, 3))

    assert layer.calls == 1


def test_a_layer_with_weights_that_forward_makes_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.second = nn.Linear(3, 3)
        return self.second(x)

    wrapped = poptorch.inferenceModel(Having(forward), options())

    with pytest.raises(poptorch.Error, match="a layer that the model did not have"):
        wrapped(torch.ones(2, 3))
