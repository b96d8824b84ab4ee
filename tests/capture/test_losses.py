"""Which value training starts from."""

from __future__ import annotations

import copy

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


CHANGED = {
    "times two": lambda loss, out: loss * 2,
    "in a tuple": lambda loss, out: (out, {"loss": [loss / 4]}),
    "next to a changed one": lambda loss, out: (loss.exp(), loss * 2),
}


@pytest.mark.spec("ops", 1)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_loss_that_is_changed_and_not_marked_is_an_error(change, lanes: int) -> None:
    """The number that comes back would not be the one that training follows."""

    def marked(out, y):
        return change(poptorch.identity_loss(out.sum() ** 2, "none"), out)

    with pytest.raises(poptorch.Error, match="not the loss that training would follow") as info:
        wrong = training(Model(marked), options(accumulation=lanes))
        wrong(X.repeat(lanes, 1), Y.repeat(lanes, 1))
    message = str(info.value)
    assert "computed from identity_loss at test_losses.py:" in message
    assert "identity_loss(value, reduction='none')" in message


RETURNED = {
    "plus a penalty": lambda out, y: mse(out, y) + 0.1 * out.square().sum(),
    "scaled by the share that is no padding": lambda out, y: mse(out, y) * out.size(1) / 2,
    "a sum of two": lambda out, y: F.mse_loss(out, y) + F.l1_loss(out, y),
    "a mean of three": lambda out, y: sum(f(out, y) for f in (mse, F.l1_loss, F.huber_loss)) / 3,
    "of losses without reduction": lambda out, y: F.mse_loss(out, y, reduction="none").sum().exp(),
}


@pytest.mark.spec("ops", 1, 2)
@pytest.mark.spec("executor", 48)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("loss", RETURNED.values(), ids=RETURNED)
def test_training_follows_the_returned_scalar_that_is_made_of_all_losses(
    loss, beside: bool, lanes: int
) -> None:
    """As ``loss.backward()`` of what forward returned would."""
    model = Model(lambda out, y: (out, {"loss": loss(out, y)}) if beside else loss(out, y))
    step = training(model, options(accumulation=lanes), lr=1.0)
    got = step(X.repeat(lanes, 1), Y.repeat(lanes, 1))
    moved = torch.tensor([1.0, 2.0, 3.0]) - model.weight.detach()
    torch.testing.assert_close(moved, eager(loss))
    with torch.no_grad():
        torch.testing.assert_close(got[1]["loss"] if beside else got, Model(loss)(X, Y))


def test_the_log_says_which_value_training_follows(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.setLogLevel("INFO")
    try:
        gradient(lambda out, y: 2 * mse(out, y))
    finally:
        poptorch.setLogLevel("WARN")
    lines = [text for text in caplog.messages if "Training follows a returned value" in text]
    assert "mse_loss at test_losses.py:" in lines[0]


def test_two_changed_values_of_one_loss_are_an_error() -> None:
    def both(out, y):
        loss = mse(out, y)
        return loss.exp(), loss * 2

    with pytest.raises(poptorch.Error, match="not the loss that training would follow"):
        gradient(both)


def test_a_changed_loss_that_is_marked_is_what_training_follows() -> None:
    def penalised(out, y):
        return poptorch.identity_loss(F.nll_loss(out, CLASS) + 0.1 * out.square().sum(), "none")

    got, loss = gradient(penalised)
    torch.testing.assert_close(got, eager(penalised))
    with torch.no_grad():
        torch.testing.assert_close(loss, Model(penalised)(X, Y))


SAME = {
    "the loss, too": lambda loss, out: (loss * 2, {"loss": loss}),
    "a mean of one value": lambda loss, out: loss.mean(),
    "the sum of one value": lambda loss, out: loss.sum(),
    "another shape": lambda loss, out: loss.reshape(1, 1).squeeze(),
    "a copy": lambda loss, out: (loss.clone().detach(), 3 * loss),
    "a number for the log": lambda loss, out: (out, loss.detach() * 100),
    "a test": lambda loss, out: (out, loss < 3),
}


@pytest.mark.spec("ops", 1)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_is_made_of_a_loss_may_be_returned_beside_it(change, lanes: int) -> None:
    model = Model(lambda out, y: change(mse(out, y), out))
    step = training(model, options(accumulation=lanes), lr=1.0)
    step(X.repeat(lanes, 1), Y.repeat(lanes, 1))
    moved = torch.tensor([1.0, 2.0, 3.0]) - model.weight.detach()
    torch.testing.assert_close(moved, eager(mse))


@pytest.mark.spec("ops", 2)
@pytest.mark.spec("executor", 48)
def test_losses_that_are_returned_apart_are_an_error_unless_one_is_marked() -> None:
    def apart(out, y):
        return F.mse_loss(out, y), F.l1_loss(out, y)

    with pytest.raises(poptorch.Error, match="Multiple independent losses found") as caught:
        gradient(apart)
    assert "poptorch.identity_loss" in str(caught.value)
    assert poptorch.inferenceModel(Model(apart), options())(X, Y)[0] > 0
    for reduction in ("none", "mean", "sum"):
        got, _ = gradient(lambda out, y, r=reduction: poptorch.identity_loss(sum(apart(out, y)), r))
        torch.testing.assert_close(got, eager(lambda out, y: sum(apart(out, y))))


@pytest.mark.spec("ops", 3)
def test_a_loss_without_reduction_counts() -> None:
    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        gradient(lambda out, y: (F.mse_loss(out, y, reduction="none"), mse(out, y)))

    def alone(out, y):
        return poptorch.identity_loss(F.mse_loss(out, y, reduction="none") * 3, "sum")

    got, _ = gradient(alone)
    torch.testing.assert_close(got, eager(lambda out, y: 3 * (out - y).square().sum()))


KNOWN = {
    "L1Loss": ((), lambda f, o, y: f(o, Y)),
    "MSELoss": ((), lambda f, o, y: f(o, Y)),
    "SmoothL1Loss": ((), lambda f, o, y: f(o, Y)),
    "HuberLoss": ((), lambda f, o, y: f(o, Y)),
    "NLLLoss": ((), lambda f, o, y: f(o, CLASS)),
    "NLLLoss2d": ((), lambda f, o, y: f(o.view(1, 3, 1, 1), CLASS.view(1, 1, 1))),
    "CrossEntropyLoss": ((), lambda f, o, y: f(o, CLASS)),
    "BCELoss": ((), lambda f, o, y: f(o.sigmoid(), Y.abs())),
    "BCEWithLogitsLoss": ((), lambda f, o, y: f(o, Y.abs())),
    "KLDivLoss": ((None, None, "sum"), lambda f, o, y: f(o, Y.abs())),
    "PoissonNLLLoss": ((), lambda f, o, y: f(o, Y.abs())),
    "GaussianNLLLoss": ((), lambda f, o, y: f(o, Y, o.abs())),
    "HingeEmbeddingLoss": ((), lambda f, o, y: f(o, Y.sign())),
    "MarginRankingLoss": ((), lambda f, o, y: f(o, 2 * o, Y.sign())),
    "SoftMarginLoss": ((), lambda f, o, y: f(o, Y.sign())),
    "LinearCrossEntropyLoss": ((3, 4), lambda f, o, y: f(o, CLASS)),
    "MultiMarginLoss": ((), lambda f, o, y: f(o, CLASS)),
    "MultiLabelMarginLoss": ((), lambda f, o, y: f(o, torch.tensor([[0, -1, 1]]))),
    "MultiLabelSoftMarginLoss": ((), lambda f, o, y: f(o, Y.abs())),
    "CosineEmbeddingLoss": ((), lambda f, o, y: f(o, Y, torch.ones(1))),
    "TripletMarginLoss": ((), lambda f, o, y: f(o, Y, Y + 1)),
    "TripletMarginWithDistanceLoss": ((), lambda f, o, y: f(o, Y, Y + 1)),
    "CTCLoss": ((), lambda f, o, y: f(
        o.view(3, 1, 1).expand(3, 1, 2).log_softmax(2) * o.view(3, 1, 1),
        torch.ones(1, 1, dtype=torch.long), (3,), (1,))),
}  # fmt: skip
TORCHS = {
    name: cls for name, cls in vars(torch.nn.modules.loss).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module) and not name.startswith("_")
    and cls.__module__ == torch.nn.modules.loss.__name__
}  # fmt: skip


@pytest.mark.spec("ops", 4)
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.filterwarnings("ignore:`NLLLoss2d` has been deprecated")
def test_every_loss_of_torch_is_known(name: str) -> None:
    arguments, call = KNOWN[name]
    function = TORCHS[name](*arguments).requires_grad_(False)
    got, loss = gradient(lambda o, y: call(function, o, y))
    torch.testing.assert_close(got, eager(lambda o, y: call(function, o, y)))
    with torch.no_grad():
        torch.testing.assert_close(loss, Model(lambda o, y: call(function, o, y))(X, Y))


def test_losses_under_torch_itself_are_known() -> None:
    """``torch.poisson_nll_loss`` is another function than the one of ``torch.nn.functional``."""

    def loss(out, y):
        return torch.poisson_nll_loss(out, y.abs(), True, False, 1e-8, 1)

    got, _ = gradient(loss)
    torch.testing.assert_close(got, eager(loss))


def test_a_margin_loss_of_one_sample_has_the_shape_that_it_really_has() -> None:
    def loss(out, y):
        each = F.multilabel_margin_loss(out[0], torch.tensor([0, -1, 1]), reduction="none")
        return poptorch.identity_loss((each * 2).square(), "sum")  # torch promises a shape of (1,)

    got, _ = gradient(loss)
    torch.testing.assert_close(got, eager(loss))


def by_hand(out, y):
    return (out - y).square().mean()


@pytest.mark.spec("ops", 4)
def test_others_need_identity_loss_in_training() -> None:
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        gradient(by_hand)
    value = poptorch.inferenceModel(Model(by_hand), options())(X, Y)
    with torch.no_grad():
        torch.testing.assert_close(value, Model(by_hand)(X, Y))
    got, _ = gradient(lambda o, y: poptorch.identity_loss(by_hand(o, y), "mean"))
    torch.testing.assert_close(got, eager(by_hand))


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


def test_a_mark_without_a_reduction_keeps_the_shape() -> None:
    got, loss = gradient(lambda out, y: poptorch.identity_loss(by_hand(out, y)))
    torch.testing.assert_close(got, eager(by_hand))
    with torch.no_grad():
        torch.testing.assert_close(loss, Model(by_hand)(X, Y))


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
    assert torch.equal(poptorch.identity_loss(x), x)
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


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_ctc_loss_of_scores_whose_batch_comes_first(backend: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x, targets, steps, labels):
            logs = self.layer(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(logs, targets, steps, labels)

    torch.manual_seed(0)
    wrapped = Net()
    native = copy.deepcopy(wrapped)
    arguments = torch.randn(2, 6, 3), torch.tensor([[1, 2], [3, 1]])
    arguments += torch.tensor([6, 5]), torch.tensor([2, 1])
    expected = native(*arguments)
    expected.backward()
    loss = training(wrapped, options(backend), lr=1.0)(*arguments)
    torch.testing.assert_close(loss, expected.detach())
    after = native.layer.weight - native.layer.weight.grad
    torch.testing.assert_close(wrapped.layer.weight, after)
