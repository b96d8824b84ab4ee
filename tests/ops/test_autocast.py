"""``poptorch.autocast`` and its policies, and torch's own autocast around a call."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.wrapping import Calling, Having, agrees, infer, options, training, unchecked
from poptorch.autocasting import Policy

HALF, FLOAT, BFLOAT = torch.float16, torch.float32, torch.bfloat16
# Eager PyTorch has no autocast of poptorch's, so what it computes differs.


def classifying(
    model: Having, x: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a layer with autocast, and the loss without."""
    with poptorch.autocast():
        out = model.layer(x)
    return out, F.cross_entropy(out.float(), labels)


@pytest.mark.parametrize("accumulation, enabled", [(4, True), (1, False)])
def test_products_run_in_half_unless_autocast_is_switched_off(
    accumulation: int, enabled: bool
) -> None:
    model = Having(classifying, layer=nn.Linear(3, 2))
    x, labels = torch.randn(8, 3), torch.arange(8) % 2
    with torch.autocast("cpu", HALF, enabled):
        expected = model.layer(x).detach()
    opts = unchecked(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    opts.Precision.autocastEnabled(enabled)

    out, loss = training(model, opts)(x, labels)

    torch.testing.assert_close(out, expected, **near(1, dtype=HALF))
    assert loss.dtype == FLOAT
    assert model.layer.weight.dtype == FLOAT


def test_the_switch_of_autocast_is_a_bool() -> None:
    precision = options().Precision

    assert precision.autocastEnabled(False) is precision
    with pytest.raises(AssertionError):
        precision.autocastEnabled("yes")


@poptorch.autocast()
def nested(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A product and a softmax in torch's autocast, and two products where it is disabled."""
    with torch.autocast("cpu", BFLOAT):
        low = F.linear(x, w), F.softmax(x, -1)
    with poptorch.autocast(enabled=False):
        return *low, F.linear(x, w), torch.relu(F.linear(x, w))


def test_autocast_nests_as_torchs_own_does() -> None:
    got = agrees(nested, torch.randn(4, 3), torch.randn(2, 3), **near(1, dtype=BFLOAT))

    assert dtypes(got) == [BFLOAT, FLOAT, FLOAT, FLOAT]


def test_autocast_acts_without_a_wrapper() -> None:
    with poptorch.autocast():
        product = torch.mm(torch.eye(2), torch.eye(2))

    assert product.dtype == HALF


def dtypes(results: Any) -> list[torch.dtype]:
    """Return the types of tensors."""
    return [result.dtype for result in results]


def policy_options(policy: Policy) -> poptorch.Options:
    """Return options with a policy."""
    opts = options()
    opts.Precision.autocastPolicy(policy)
    return opts


def test_setting_a_policy_returns_the_options() -> None:
    precision = options().Precision

    assert precision.autocastPolicy(Policy()) is precision


X, W = torch.randn(4, 3), torch.randn(2, 3)


@pytest.mark.parametrize(
    "function, expected",
    [
        pytest.param(lambda x, h, w: torch.add(x, x), HALF, id="fp16"),
        pytest.param(lambda x, h, w: F.linear(h, w), FLOAT, id="fp32"),
        pytest.param(lambda x, h, w: torch.mul(x, h), FLOAT, id="promote float and half"),
        pytest.param(lambda x, h, w: torch.mul(h, h), HALF, id="promote halves"),
        pytest.param(lambda x, h, w: torch.sub(x, h), HALF, id="demote float and half"),
        pytest.param(lambda x, h, w: torch.sub(x, x), FLOAT, id="demote floats"),
        pytest.param(lambda x, h, w: torch.matmul(x, w.t()), HALF, id="not named"),
    ],
)
def test_a_policy_chooses_the_type_of_each_function(function: Any, expected: torch.dtype) -> None:
    """Functions that it does not name have their usual type."""
    policy = Policy(fp16=[torch.add], fp32=[nn.Linear], promote=[torch.mul], demote=["sub"])

    got = infer(poptorch.autocast()(function), X, X.half(), W, opts=policy_options(policy))

    assert got.dtype == expected


def test_a_function_that_a_policy_names_for_half_computes_in_half() -> None:
    opts = policy_options(Policy(fp16=[torch.add]))

    got = infer(poptorch.autocast()(lambda x: torch.add(x, x)), X, opts=opts)

    torch.testing.assert_close(got, (X + X).half())


def test_a_policy_names_the_function_of_a_module() -> None:
    policy = Policy(fp16=[nn.LayerNorm, nn.BatchNorm2d, nn.CrossEntropyLoss, nn.GELU], fp32=["mm"])

    assert policy.fp16 == ["layer_norm", "batch_norm", "cross_entropy", "gelu"]


def test_a_module_that_a_policy_names_for_half_computes_in_half() -> None:
    norm = nn.LayerNorm(3)
    opts = policy_options(Policy(fp16=[nn.LayerNorm]))

    got = infer(poptorch.autocast()(lambda x: norm(x)), X, opts=opts)

    expected = F.layer_norm(X.half(), (3,), norm.weight.half(), norm.bias.half())
    assert torch.equal(got, expected)


def test_torchs_autocast_around_a_call_holds_for_that_call() -> None:
    """Calls follow one another; where autocast is disabled, no digit of a float is lost."""

    def forward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", enabled=False):
            whole = a @ b
        return whole, a @ b

    executor = poptorch.inferenceModel(Calling(forward), options(iterations=2))
    a, b = torch.eye(3).repeat(2, 1), torch.full((6, 3), 1 + 2**-20)
    for kind in (HALF, FLOAT, BFLOAT, FLOAT):
        with torch.autocast("cpu", kind, enabled=kind is not FLOAT):
            whole, cast = executor(a, b)

        assert cast.dtype == kind
        assert whole.dtype == FLOAT
        assert torch.equal(whole, b)
