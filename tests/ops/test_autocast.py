"""``poptorch.autocast`` and its options, beside torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.wrapping import Calling, Having, agrees, infer, options, training
from poptorch.autocasting import Policy

HALF, FLOAT = torch.float16, torch.float32


def dtypes(results):
    return [result.dtype for result in results]


def classifying(model, x, labels):
    with poptorch.autocast():
        out = model.layer(x)
    return out, F.cross_entropy(out.float(), labels)


@pytest.mark.parametrize("accumulation, enabled", [(4, True), (1, False)])
def test_products_run_in_half_unless_switched_off(accumulation, enabled):
    model = Having(classifying, layer=nn.Linear(3, 2))
    x, labels = torch.randn(8, 3), torch.arange(8) % 2
    with torch.autocast("cpu", HALF, enabled):
        want = model.layer(x).detach()
    opts = options(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    assert opts.Precision.autocastEnabled(enabled) is opts.Precision
    with pytest.raises(AssertionError):
        opts.Precision.autocastEnabled("yes")
    out, loss = training(model, opts)(x, labels)
    assert loss.dtype == FLOAT
    torch.testing.assert_close(out, want, **near(1, dtype=HALF))
    assert model.layer.weight.dtype == FLOAT


def test_it_nests_as_torchs_own_does():
    @poptorch.autocast()
    def forward(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            low = F.linear(x, w), F.softmax(x, -1)
        with poptorch.autocast(enabled=False):
            return *low, F.linear(x, w), torch.relu(F.linear(x, w))

    with poptorch.autocast():
        assert torch.mm(torch.eye(2), torch.eye(2)).dtype == HALF
    got = agrees(forward, torch.randn(4, 3), torch.randn(2, 3), **near(1, dtype=torch.bfloat16))
    assert dtypes(got) == [torch.bfloat16, FLOAT, FLOAT, FLOAT]


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
    assert dtypes(got) == [HALF, FLOAT, FLOAT, HALF, HALF, FLOAT, HALF]
    torch.testing.assert_close(got[0], (x + x).half())
    policy = Policy(fp16=[nn.LayerNorm, nn.BatchNorm2d, nn.CrossEntropyLoss, nn.GELU], fp32=["mm"])
    assert policy.fp16 == ["layer_norm", "batch_norm", "cross_entropy", "gelu"]
    opts, norm = options(), nn.LayerNorm(3)
    opts.Precision.autocastPolicy(Policy(fp16=[nn.LayerNorm]))
    got = infer(poptorch.autocast()(lambda x: norm(x)), x, opts=opts)
    assert torch.equal(got, F.layer_norm(x.half(), (3,), norm.weight.half(), norm.bias.half()))


def test_surroundings_that_cast_are_those_of_a_call_and_do_not_reach_the_program() -> None:
    def forward(a, b):
        with torch.autocast("cpu", enabled=False):
            whole = a @ b
        return whole, a @ b

    a, b = torch.eye(3).repeat(2, 1), torch.full((6, 3), 1 + 2**-20)
    executor = poptorch.inferenceModel(Calling(forward), options(iterations=2))
    for kind in (HALF, FLOAT, torch.bfloat16, FLOAT):
        with torch.autocast("cpu", kind, enabled=kind is not FLOAT):
            whole, cast = executor(a, b)
        assert (whole.dtype, cast.dtype) == (FLOAT, kind)
        assert torch.equal(whole, b)
