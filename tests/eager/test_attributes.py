"""What ``forward`` changes in attributes, and reads the next time, is told: a program is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, options


@pytest.fixture(autouse=True)
def _nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class WarmUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * min(1.0, self.step / 10)


class Ready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self._ready = nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._ready:
            self._ready = True
            x = x - x.mean()
        return self.layer(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.previous
        self.previous = x[0].detach()
        return out


def infer(model: nn.Module) -> Any:
    return poptorch.inferenceModel(model, options().checkAgainstEager("error"))(torch.randn(4, 3))


@pytest.mark.parametrize(
    "model, name", [(WarmUp(), "step"), (Ready(), "_ready"), (Remembering(), "previous")]
)
def test_an_attribute_that_decides_the_next_run_is_named(model: nn.Module, name: str) -> None:
    with pytest.raises(poptorch.Error, match=f"Got:    {name};"):
        infer(model)


def test_the_line_that_changes_it_is_named() -> None:
    with pytest.raises(poptorch.Error, match=r"self.step \+= 1"):
        infer(WarmUp())


def test_an_attribute_that_nothing_reads_is_no_difference() -> None:
    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        return x + 1

    out = infer(Having(count, calls=0, shapes=[]))

    assert out.shape == (4, 3)


def test_a_mask_that_is_made_once_is_no_difference() -> None:
    def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.tensor([1.0, 0.0, 1.0])
        return x * self.mask

    out = infer(Having(masked, mask=None))

    assert out.shape == (4, 3)


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_a_layer_that_the_first_run_replaces_by_an_equal_one_is_no_difference(rate: float) -> None:
    def settled(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.is_settled:
            copied = nn.Linear(3, 3)  # draws initial values, which the copy overwrites
            copied.weight, copied.bias = self.layer.weight, self.layer.bias
            self.layer, self.is_settled = copied, True
        return nn.functional.dropout(self.layer(x), rate)

    out = infer(Having(settled, layer=nn.Linear(3, 3), is_settled=False))

    assert out.shape == (4, 3)
