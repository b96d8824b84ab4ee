"""What published programs rely on, as far as no other test shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layer(x).square().mean(), reduction="none")


def wrapped(model: Net, options: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    options = options or poptorch.Options()
    options.backend("reference").showCompilationProgressBar(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer)


@pytest.mark.spec("programs", 4, 15, 29)
def test_compiling_with_made_up_inputs_trains_nothing() -> None:
    model = Net()
    before = model.layer.weight.detach().clone()
    training = wrapped(model)
    assert training.layer is training.model.layer
    training.compile(torch.full((3, 2), 7.0))
    assert torch.equal(model.layer.weight, before)
    x = torch.randn(3, 2)
    expected = (x @ before.T + model.layer.bias.detach()).square().mean()
    torch.testing.assert_close(training(x), expected)
    assert not torch.equal(model.layer.weight, before)


@pytest.mark.spec("programs", 7, 27)
def test_detaching_is_for_what_is_attached() -> None:
    training = wrapped(Net())
    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        training.detachFromDevice()
    training(torch.randn(3, 2))
    for _ in range(2):
        if training.isAttachedToDevice():
            training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        training.detachFromDevice()


@pytest.mark.spec("programs", 17, 18, 21, 30)
def test_switches_of_command_lines(tmp_path: Path) -> None:
    mode = poptorch.OutputMode["All"]
    assert mode is poptorch.OutputMode.All is getattr(poptorch.OutputMode, mode.name)
    options = poptorch.Options().useIpuModel(True).outputMode(mode)
    options.enableExecutableCaching(str(tmp_path / "not" / "there")).enableExecutableCaching(None)
    half = Net().half()
    training = wrapped(half, options)
    training.compile(torch.randn(3, 2).half())
    assert {value.dtype for value in half.state_dict().values()} == {torch.float16}
    offline = wrapped(Net(), poptorch.Options().useOfflineIpuTarget())
    offline.compile(torch.randn(3, 2))
    assert not offline.isAttachedToDevice()
