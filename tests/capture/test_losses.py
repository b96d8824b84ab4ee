"""Which value training starts from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import options, training


class Model(nn.Module):
    """One weight per input column; what forward makes of ``out`` and ``y`` is a function's job."""

    def __init__(self, losses) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.losses = losses

    def forward(self, x, y):
        return self.losses(self.weight * x, y)


X, Y = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.5, 1.0, -1.0]])
CLASS = torch.tensor([2])


def gradient(losses, y=Y, counts=None) -> tuple[torch.Tensor, object]:
    """The gradient that a training step used, and what forward returned."""
    model = Model(losses)
    before = model.weight.detach().clone()
    out = training(model, options(**(counts or {})), lr=1.0)(X, y)
    return before - model.weight.detach(), out


def eager(loss, y=Y) -> torch.Tensor:
    """The gradient of a scalar function of the outputs in eager torch."""
    model = Model(loss)
    model(X, y).backward()
    return model.weight.grad


def mse(out, y):
    return F.mse_loss(out, y)


@pytest.mark.spec("ops", 1)
def test_what_comes_after_the_loss_changes_the_number_only() -> None:
    got, loss = gradient(lambda out, y: 0.5 * F.mse_loss(out, y) + out.sum())
    torch.testing.assert_close(got, eager(mse))
    with torch.no_grad():
        torch.testing.assert_close(loss, Model(lambda o, y: 0.5 * F.mse_loss(o, y) + o.sum())(X, Y))


@pytest.mark.spec("ops", 2)
@pytest.mark.spec("executor", 48)
def test_a_plain_sum_of_losses_is_an_error_unless_it_is_marked() -> None:
    def both(out, y):
        return F.mse_loss(out, y) + F.l1_loss(out, y)

    with pytest.raises(poptorch.Error, match="Multiple independent losses found") as caught:
        gradient(both)
    assert "poptorch.identity_loss" in str(caught.value)
    assert poptorch.inferenceModel(Model(both), options())(X, Y) > 0
    for reduction in ("none", "mean", "sum"):
        got, _ = gradient(lambda out, y, r=reduction: poptorch.identity_loss(both(out, y), r))
        torch.testing.assert_close(got, eager(both))


@pytest.mark.spec("ops", 3)
def test_a_loss_without_reduction_counts() -> None:
    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        gradient(lambda out, y: F.mse_loss(out, y, reduction="none").mean() + mse(out, y))

    def alone(out, y):
        return poptorch.identity_loss(F.mse_loss(out, y, reduction="none") * 3, "sum")

    got, _ = gradient(alone)
    torch.testing.assert_close(got, eager(lambda out, y: 3 * (out - y).square().sum()))


KNOWN = {
    "l1_loss": (F.l1_loss, Y), "mse_loss": (F.mse_loss, Y), "smooth_l1_loss": (F.smooth_l1_loss, Y),
    "nll_loss": (F.nll_loss, CLASS), "cross_entropy": (F.cross_entropy, CLASS),
    "nll_loss 2d": (lambda o, y: F.nll_loss(o.view(1, 3, 1), y.view(1, 1)), CLASS),
    "binary_cross_entropy": (lambda o, y: F.binary_cross_entropy(o.sigmoid(), y.abs()), Y),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, Y.abs()),
    "kl_div": (lambda o, y: F.kl_div(o, y.abs(), reduction="batchmean"), Y),
    "poisson_nll_loss": (F.poisson_nll_loss, Y.abs()),
    "hinge_embedding_loss": (F.hinge_embedding_loss, Y.sign()),
    "margin_ranking_loss": (lambda o, y: F.margin_ranking_loss(o, 2 * o, y), Y.sign()),
    "soft_margin_loss": (F.soft_margin_loss, Y.sign()),
    "cosine_embedding_loss": (lambda o, y: F.cosine_embedding_loss(o, y, torch.ones(1)), Y),
    "triplet_margin_loss": (lambda o, y: F.triplet_margin_loss(o, y, y + 1), Y),
    "ctc_loss": (
        lambda o, y: F.ctc_loss(o.view(3, 1, 1).expand(3, 1, 2).log_softmax(2) * o.view(3, 1, 1),
                                torch.ones(1, 1, dtype=torch.long), (3,), (1,)), Y),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_torchs_losses_are_known(name: str) -> None:
    loss, y = KNOWN[name]
    got, _ = gradient(loss, y)
    torch.testing.assert_close(got, eager(loss, y))


UNKNOWN = {
    "huber_loss": F.huber_loss,
    "gaussian_nll_loss": lambda o, y: F.gaussian_nll_loss(o, y, 1.0),
    "multi_margin_loss": lambda o, y: F.multi_margin_loss(o, CLASS),
    "multilabel_margin_loss": lambda o, y: F.multilabel_margin_loss(o, torch.tensor([[0, -1, 1]])),
    "multilabel_soft_margin_loss": lambda o, y: F.multilabel_soft_margin_loss(o, y.abs()),
    "triplet with distance": lambda o, y: F.triplet_margin_with_distance_loss(o, y, y + 1),
    "by hand": lambda o, y: (o - y).square().mean(),
}


@pytest.mark.spec("ops", 4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_others_need_identity_loss_in_training(name: str) -> None:
    loss = UNKNOWN[name]
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        gradient(loss)
    value = poptorch.inferenceModel(Model(loss), options())(X, Y)
    with torch.no_grad():
        torch.testing.assert_close(value, Model(loss)(X, Y))
    got, _ = gradient(lambda o, y: poptorch.identity_loss(loss(o, y), "mean"))
    torch.testing.assert_close(got, eager(loss))


@pytest.mark.spec("ops", 5)
def test_inner_losses_keep_their_reduction_and_may_be_returned() -> None:
    def nested(out, y):
        total = poptorch.identity_loss(out * y, "sum")
        each = poptorch.identity_loss((out - y).abs(), "none")
        final = poptorch.identity_loss(total.square() + each.sum(), "none")
        return final, total, each, out

    got, (final, total, each, out) = gradient(nested)
    torch.testing.assert_close(got, eager(lambda o, y: nested(o, y)[0]))
    torch.testing.assert_close(total, (out * Y).sum())
    torch.testing.assert_close(each, (out - Y).abs())
    torch.testing.assert_close(final, total**2 + each.sum())


@pytest.mark.parametrize("cut", [torch.Tensor.detach, lambda t: torch.tensor(0.0).add_(t.detach())])
def test_a_path_without_gradient_demotes_too(cut) -> None:
    def weighted(out, y):
        return poptorch.identity_loss(out.square() * cut(F.l1_loss(out, y)), "sum")

    got, _ = gradient(weighted)
    torch.testing.assert_close(got, eager(weighted))


def test_losses_that_nothing_is_trained_by() -> None:
    got, loss = gradient(lambda out, y: poptorch.identity_loss(F.mse_loss(y, 2 * y) * 2, "none"))
    assert not got.any()
    torch.testing.assert_close(loss, 2 * Y.square().mean())


def test_a_loss_that_is_not_returned_is_found() -> None:
    def forward(out, y):
        F.mse_loss(out, y)
        return [out]

    got, _ = gradient(forward)
    torch.testing.assert_close(got, eager(mse))


@pytest.mark.spec("ops", 6)
def test_identity_loss_outside_a_wrapper_is_a_plain_reduction() -> None:
    x = torch.randn(3, requires_grad=True)
    assert poptorch.identity_loss(x, "sum") == x.sum()
    assert poptorch.identity_loss(x, reduction="mean") == x.mean()
    assert torch.equal(poptorch.identity_loss(x, reduction="none"), x)
    poptorch.identity_loss(x * 2, "mean").backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2 / 3))
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(x, "max")


@pytest.mark.parametrize("lengths", ["tuples", "tensors"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss(lengths: str, reduction: str) -> None:
    torch.manual_seed(2)
    scores = torch.randn(6, 2, 4)
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]])
    steps, labels = (6, 5), (3, 2)
    if lengths == "tensors":
        steps, labels = torch.tensor(steps), torch.tensor(labels)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, scores):
            logs = (scores + self.shift).log_softmax(-1)
            loss = F.ctc_loss(logs, targets, steps, labels, reduction=reduction)
            return poptorch.identity_loss(loss, "sum")

    wrapped, native = Net(), Net()
    loss = training(wrapped, lr=1.0)(scores)
    expected = native(scores)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(wrapped.shift.detach(), -native.shift.grad)
