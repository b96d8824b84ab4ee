"""Products of tensors of different types: eager torch refuses them, and so does a capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import options


class Product(nn.Module):
    """One of the products of torch, with a weight in single precision."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "linear":
            return self.layer(x)
        return x @ (self.layer.weight[0] if self.kind == "mv" else self.layer.weight)


@pytest.mark.parametrize("kind", ["linear", "mm", "mv"])
@pytest.mark.parametrize("price", [False, True])
def test_operands_of_different_types_are_named_with_the_line(kind: str, price: bool) -> None:
    model, x = Product(kind).eval(), torch.ones(3, 4, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        model(x)
    wrapped = poptorch.inferenceModel(model, options())
    with pytest.raises(poptorch.Error, match="A product needs operands of one type") as caught:
        wrapped.estimate(x) if price else wrapped(x)
    said = str(caught.value)
    assert "torch.int32" in said
    assert "torch.float32" in said
    assert "test_operands.py" in said
    torch.testing.assert_close(wrapped(x.float()), model(x.float()))
