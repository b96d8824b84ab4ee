"""``poptorch.autocast`` and its options, beside torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Calling, infer, options, training
from poptorch.autocasting import Policy

HALF, FLOAT = torch.float16, torch.float32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, labels):
        with poptorch.autocast():
            out = self.layer(x)
        return out, F.cross_entropy(out.float(), labels)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_products_run_in_half(accumulation):
    torch.manual_seed(0)
    model, x, labels = Model(), torch.randn(8, 3), torch.arange(8) % 2
    with torch.autocast("cpu", HALF):
        want = model.layer(x).detach()
    opts = options(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    out, loss = training(model, opts)(x, labels)
    assert (out.dtype, loss.dtype) == (HALF, FLOAT)
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
    assert model.layer.weight.dtype == FLOAT


def test_torchs_own_works_in_forward_too():
    def forward(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w), F.softmax(x, -1)

    x, w = torch.randn(4, 3), torch.randn(2, 3)
    got = infer(forward, x, w)
    assert [t.dtype for t in got] == [torch.bfloat16, FLOAT]
    torch.testing.assert_close(got[0], forward(x, w)[0], rtol=1e-2, atol=1e-2)


def test_it_can_be_switched_off():
    opts = options()
    assert opts.Precision.autocastEnabled(False) is opts.Precision
    out, _ = training(Model(), opts)(torch.randn(4, 3), torch.arange(4) % 2)
    assert out.dtype == FLOAT

    @poptorch.autocast()
    def inner(x, w):
        first = F.linear(x, w)
        with poptorch.autocast(enabled=False):
            return first, F.linear(x, w)

    got = infer(inner, torch.randn(4, 3), torch.randn(2, 3))
    assert [t.dtype for t in got] == [HALF, FLOAT]
    with pytest.raises(AssertionError):
        options().Precision.autocastEnabled("yes")


def test_a_policy_chooses_the_functions():
    opts = options()
    policy = Policy(fp16=[torch.add], fp32=[nn.Linear], promote=[torch.mul], demote=["sub"])
    assert opts.Precision.autocastPolicy(policy) is opts.Precision

    @poptorch.autocast()
    def forward(x, h, w):
        products = F.linear(h, w), torch.mul(x, h), torch.mul(h, h)
        return torch.add(x, x), *products, torch.sub(x, h), torch.sub(x, x), torch.matmul(x, w.t())

    x, w = torch.randn(4, 3), torch.randn(2, 3)
    got = infer(forward, x, x.half(), w, opts=opts)
    assert [t.dtype for t in got] == [HALF, FLOAT, FLOAT, HALF, HALF, FLOAT, HALF]
    torch.testing.assert_close(got[0], (x + x).half())


def test_outside_a_wrapped_model_it_is_torchs():
    with poptorch.autocast():
        assert torch.mm(torch.eye(2), torch.eye(2)).dtype == HALF
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype == FLOAT


def test_surroundings_that_cast_are_recorded_once_and_do_not_reach_the_program() -> None:
    def forward(a, b):
        with torch.autocast("cpu", enabled=False):
            whole = a @ b
        return whole, a @ b

    a, b = torch.eye(3), torch.full((3, 3), 1 + 2**-20)
    executor = poptorch.inferenceModel(Calling(forward), options())
    with torch.autocast("cpu", torch.float16):
        first = executor(a, b)
    second = executor(a, b)
    for whole, half in (first, second):
        assert (whole.dtype, half.dtype) == (torch.float32, torch.float16)
        assert torch.equal(whole, b)


def test_a_policy_of_layers_reaches_the_functions_that_they_call() -> None:
    policy = Policy(fp16=[nn.LayerNorm, nn.BatchNorm2d, nn.CrossEntropyLoss, nn.GELU], fp32=["mm"])
    assert policy.fp16 == ["layer_norm", "batch_norm", "cross_entropy", "gelu"]
    opts = options()
    opts.Precision.autocastPolicy(Policy(fp16=[nn.LayerNorm]))
    norm = nn.LayerNorm(3)

    @poptorch.autocast()
    def forward(x):
        return norm(x)

    x = torch.randn(4, 3)
    got = infer(forward, x, opts=opts)
    assert got.dtype == HALF
    assert torch.equal(got, F.layer_norm(x.half(), (3,), norm.weight.half(), norm.bias.half()))


def test_a_policy_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="fp16 must be a list"):
        Policy(fp16="matmul")
    for entry in ("matmull", nn.MultiheadAttention, 3):
        with pytest.raises(ValueError, match="names no function of torch"):
            Policy(demote=[entry])
