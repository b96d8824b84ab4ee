"""Where parameters, buffers and the rest are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.placing import X, chain, homes, options, place
from poptorch import AutoStage, PipelinedExecution


def test_weights_live_where_they_are_used() -> None:
    found = homes(chain(None, ("A", 1), ("B", 2)))
    assert {key: chips for key, chips in found.items() if "weight" in key} == {
        "param.layers.0.weight": (0,),
        "param.layers.1.weight": (1,),
        "param.layers.2.weight": (2,),
    }


class Shared(nn.Module):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), last

    def forward(self, x):
        poptorch.Block.start("A", 0)
        x = self.layer(x)
        poptorch.Block.start("B", 1)
        x = x.relu()
        poptorch.Block.start("C", self.last)
        return poptorch.identity_loss(self.layer(x), "mean")


def test_shared_weights_must_be_on_one_device() -> None:
    opts = options(PipelinedExecution(AutoStage.AutoIncrement))
    with pytest.raises(poptorch.Error, match=r"'layer\.(weight|bias)' is shared by several IPUs"):
        place(Shared(2), X, opts=opts)
    assert homes(place(Shared(0), X, opts=opts))["param.layer.weight"] == (0,)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, change: bool):
        poptorch.Block.start("A", 0)
        x = x * self.count * self.scale
        poptorch.Block.start("B", 1)
        x = x + self.scale
        if change:
            self.count += 1
        return x


class ChangesElsewhere(Counting):
    def forward(self, x):
        return super().forward(x, change=True)


class OnlyReads(Counting):
    def forward(self, x):
        return super().forward(x, change=False)


def test_buffers_may_be_read_everywhere_but_changed_on_one_device_only() -> None:
    opts = options(training=False)
    with pytest.raises(poptorch.Error, match="'count' is changed on one IPU and used on another"):
        place(ChangesElsewhere(), X, opts=opts, training=False)
    found = homes(place(OnlyReads(), X, opts=opts, training=False))
    assert found == {"buffer.count": (0,), "buffer.scale": (0, 1)}
