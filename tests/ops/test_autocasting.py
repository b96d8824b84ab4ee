"""``autocast`` of old releases: torch's own, in half."""

from __future__ import annotations

import torch
from torch import nn

import poptorch
from poptorch._ops import autocast
from wrapped import normal
from wrapping import infer, options, training


class Half(nn.Module):
    """A layer in half below a loss in float."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.enabled = nn.Linear(4, 4), enabled

    def forward(self, x):
        with poptorch.autocast(enabled=self.enabled):
            out = self.layer(x)
        return out, poptorch.identity_loss(out.float().square(), "mean")


def test_products_run_in_half_in_the_program_as_outside() -> None:
    x = normal(3, 4)
    wrapped, native = training(Half()), Half()
    out, loss = wrapped(x)
    expected, expected_loss = native(x)
    assert out.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(out, expected.detach(), rtol=1e-3, atol=1e-3)
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-3, atol=1e-3)
    trained = native.layer.weight - 0.1 * native.layer.weight.grad
    torch.testing.assert_close(wrapped.model.layer.weight, trained, rtol=1e-3, atol=1e-4)
    assert wrapped.model.layer.weight.dtype == torch.float32


def test_it_can_be_switched_off_and_decorates() -> None:
    x = normal(3, 4)
    with poptorch.autocast():
        assert infer(Half(enabled=False), x)[0].dtype == torch.float32

    @poptorch.autocast()
    def product(a, b):
        return a @ b

    assert infer(product, x, x.t().contiguous()).dtype == torch.float16
    assert product(x, x.t()).dtype == torch.float16


def test_it_says_once_what_it_is(caplog) -> None:
    autocast._warn.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            poptorch.autocast(False)
    assert caplog.text.count("autocast is deprecated") == 1


def test_a_policy_can_still_be_built() -> None:
    policy = poptorch.autocasting.Policy(fp16=["matmul"], fp32=[torch.tanh])
    opts = options()
    opts.Precision.autocastEnabled(True).autocastPolicy(policy)
    assert infer(lambda x: x.tanh(), torch.ones(2), opts=opts).dtype == torch.float32
