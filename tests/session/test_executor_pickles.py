"""An executor over an annotated model travels through ``torch.save`` before it is compiled."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapped import options


class Annotated(nn.Module):
    """One block from outside, one from a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        poptorch.BeginBlock(self.second, "B", ipu_id=1)

    @poptorch.BlockFunction("A", ipu_id=0)
    def start(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).relu()

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        out = self.second(self.start(x))
        return out, F.mse_loss(out, y)


@pytest.mark.spec("parallel", 47)
def test_saved_before_it_is_compiled(tmp_path: Path) -> None:
    model = Annotated()
    eager = copy.deepcopy(model)
    training = poptorch.trainingModel(model, options(accumulation=4))
    torch.save(training, tmp_path / "executor.pt")
    loaded = torch.load(tmp_path / "executor.pt", weights_only=False)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    _, loss = loaded(x, y)
    chunks = [eager(*part)[1] for part in zip(x.chunk(4), y.chunk(4), strict=True)]
    torch.testing.assert_close(loss, chunks[-1])
    stages = [(stage.blocks, stage.chip) for stage in loaded.plan().layout.stages]
    assert stages == [(("A",), 0), (("B",), 1)]
    assert not training.isCompiled()
