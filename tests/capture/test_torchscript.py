"""TorchScript that asks for values while a model is captured."""

from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, infer, normal, trains_alike

X = normal(4, 3)


@torch.jit.script
def signed(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x * 3


@torch.jit.script
def shrunk(x: torch.Tensor) -> torch.Tensor:
    while bool(x.abs().max() > 1):
        x = x / 2
    return x


@torch.jit.script
def scaled_by_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


class Signed(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if bool(x.sum() > 0):
            return x * 2
        return x * 3


@pytest.mark.parametrize("function", [signed, shrunk, torch.jit.script(Signed())])
def test_a_script_takes_the_path_of_the_first_inputs_with_a_warning(
    function: nn.Module | torch.ScriptFunction, caplog: pytest.LogCaptureFixture
) -> None:
    got = infer(lambda x: function(x), X)

    torch.testing.assert_close(got, function(X))
    assert "forward branches on the values of tensors" in caplog.text
    assert "test_torchscript.py" in caplog.text


def test_a_script_that_branches_on_values_trains(caplog: pytest.LogCaptureFixture) -> None:
    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = signed(model.layer(x).square())  # positive in every step
        return out, poptorch.identity_loss(out, "mean")

    torch.manual_seed(0)
    trains_alike(Having(forward, layer=nn.Linear(3, 3)), X, accumulation=2)

    assert "forward branches on the values of tensors" in caplog.text


def test_a_script_that_computes_with_a_value_it_reads_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="a scripted function asks") as refused:
        infer(lambda x: scaled_by_its_sum(x), X)

    assert "test_torchscript.py" in refused.value.message
