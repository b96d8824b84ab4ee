"""Choosing how many micro-batches run side by side."""

from __future__ import annotations

import pytest
import torch

import poptorch


class Looping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        y = poptorch.for_loop(2, lambda h: self.layer(h), [x])[0]
        return poptorch.identity_loss(y.sum(), reduction="none")


def test_errors_of_one_micro_batch_say_nothing_of_an_attempt_with_several() -> None:
    options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(Looping(), options)
    with pytest.raises(poptorch.Error, match="only supported in inference") as raised:
        training(torch.ones(2, 3))
    assert raised.value.__context__ is None
