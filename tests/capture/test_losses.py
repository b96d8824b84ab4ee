"""Which value training starts from."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import poptorch
from helpers.cases import expressions, pairs
from helpers.wrapping import Having, options, training

X, Y = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.5, 1.0, -1.0]])
MICRO_BATCHES = [(X, Y), (X.flip(1) / 2, Y + 0.25)]
CLASS = torch.tensor([2])
mse, each = F.mse_loss, functools.partial(F.mse_loss, reduction="none")


def model_of(losses: Callable[..., Any]) -> Having:
    """One weight per input column; what forward makes of ``out`` and ``y`` is a function's job."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    return Having(lambda model, x, y: losses(model.weight * x, y), weight=weight)


def follows(losses: Callable[..., Any], loss: Callable[..., Any], lanes: int = 1) -> object:
    """Compare the gradient of a step with that of a function in torch; return what came of it."""
    model, eager = model_of(losses), model_of(loss)
    for batch in MICRO_BATCHES[:lanes]:
        (eager(*batch) / lanes).backward()
    before, out = model.weight.detach().clone(), step(model, lanes)
    torch.testing.assert_close(before - model.weight.detach(), eager.weight.grad)
    return out


def step(model: Having, lanes: int) -> object:
    """X and Y are the last micro-batch, whose results are returned."""
    executor = training(model, options(accumulation=lanes), lr=1.0)
    return executor(*map(torch.cat, zip(*MICRO_BATCHES[:lanes][::-1], strict=True)))


def value_of(loss: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, model_of(loss)(X, Y))


def by_hand(out: torch.Tensor, y: torch.Tensor) -> Any:
    return (out - y).square().mean()


def marked(value: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    return poptorch.identity_loss(value, reduction)


def separate_losses(out: torch.Tensor, y: torch.Tensor) -> Any:
    return F.mse_loss(out, y), F.l1_loss(out, y)


def switched_off(out: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        out = out * 2  # here
    return out, mse(out, y)


NOT_FOLLOWED, SEVERAL = "not the loss that training would minimise", "Multiple independent losses"
NO_GRADIENT, NO_SCALAR = "has no gradient", "must be a scalar"
NOT_FOUND = "Couldn't find a loss in graph"
REFUSED = {
    line: (losses, title)
    for title in (NOT_FOLLOWED, SEVERAL, NO_GRADIENT, NO_SCALAR, NOT_FOUND)
    for line, losses in expressions(title, "o, y", **globals()).items()
} | {
    "detached": (lambda o, y: mse(o.detach() * 2, y), NO_GRADIENT, "o.detach() * 2"),
    "of a choice": (lambda o, y: marked(o.argmax(1).float().mean()), NO_GRADIENT, "argmax"),
    "a metric": (
        lambda o, y: (by_hand(o, y), F.l1_loss(o, y).detach()),
        NOT_FOUND,
        "l1_loss at",
        "is a metric",
        "identity_loss",
    ),
    "a metric in no_grad": (
        lambda o, y: by_hand(o, y) * torch.no_grad()(mse)(o, y),
        NOT_FOUND,
        "mse_loss at",
        "is a metric",
        "identity_loss",
    ),
    "switched off": (switched_off, NO_GRADIENT, "# here"),
}


@pytest.mark.spec("ops", 1, 2, 3, 4)
@pytest.mark.spec("executor", 48)
@pytest.mark.parametrize(
    ("losses", "title", "parts"),
    [
        pytest.param(losses, title, parts, id=name)
        for name, (losses, title, *parts) in REFUSED.items()
    ],
)
def test_results_that_training_would_not_follow_are_errors(
    losses: Callable[..., Any], title: str, parts: list[str]
) -> None:
    """The number that comes back would not be the one that training follows."""
    with pytest.raises(poptorch.Error, match=title) as caught:
        step(model_of(losses), lanes=2)

    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    if title != NO_GRADIENT:
        assert "poptorch.identity_loss" in message


TORCHS = {
    name: cls
    for name, cls in vars(torch.nn.modules.loss).items()
    if isinstance(cls, type)
    and issubclass(cls, nn.Module)
    and not name.startswith("_")
    and cls.__module__ == torch.nn.modules.loss.__name__
}


def scores_of(o: Any) -> Any:
    return o.view(3, 1, 1).expand(3, 1, 2).log_softmax(2) * o.view(3, 1, 1)


CLASSES = pairs("classes", "f, o", **globals(), **TORCHS)
KNOWN = {line.partition("(")[0]: made_and_called for line, made_and_called in CLASSES.items()}


@functools.cache
def known(name: str) -> nn.Module:
    return KNOWN[name][0](None, None).requires_grad_(False)


RETURNED = expressions("returned", "o, y", **globals()) | {
    name: lambda o, y, name=name: KNOWN[name][1](known(name), o) for name in TORCHS
}


def adapted(out: torch.Tensor, y: torch.Tensor) -> Any:
    inner = mse(out, y)
    (step,) = torch.autograd.grad(inner, out, create_graph=True)
    return F.l1_loss(out - 0.3 * step, y), inner


def penalised(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse(out, y) + 0.1 * out.square().sum()


FOLLOWED = pairs("followed", "o, y", **globals()) | {
    name: (lambda o, y, loss=loss: (o, {"loss": loss(o, y)}), loss)
    for name, loss in RETURNED.items()
}


@pytest.mark.spec("ops", 1, 2, 3, 4)
@pytest.mark.spec("executor", 48)
@pytest.mark.filterwarnings("ignore:`NLLLoss2d` has been deprecated")
@pytest.mark.parametrize("losses, loss", FOLLOWED.values(), ids=FOLLOWED)
def test_training_follows_the_returned_scalar_that_is_made_of_all_losses(
    losses: Callable[..., Any], loss: Callable[..., Any]
) -> None:
    """This equals ``loss.backward()`` of the returned value, without metrics and inner losses."""
    torch.testing.assert_close(follows(losses, loss, lanes=2), value_of(losses))


@pytest.mark.spec("ops", 5)
def test_inner_losses_keep_their_reduction_and_may_be_returned() -> None:
    def nested(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, each = marked(out * y, "sum"), marked((out - y).abs())
        return marked(total.square() + each.sum()), total, each, out

    torch.testing.assert_close(follows(nested, lambda o, y: nested(o, y)[0]), value_of(nested))


@pytest.mark.spec("executor", 47)
@pytest.mark.spec("ops", 6)
@pytest.mark.parametrize("reduction, reduce", [("sum", torch.sum), ("mean", torch.mean)])
def test_identity_loss_outside_a_wrapper_is_a_plain_reduction(
    reduction: str, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(3)

    loss = poptorch.identity_loss(x, reduction)

    assert loss == reduce(x)


@pytest.mark.spec("executor", 47)
@pytest.mark.spec("ops", 6)
def test_identity_loss_without_a_reduction_returns_its_argument() -> None:
    """Release 1.0 had no argument for it."""
    x = torch.randn(3)

    assert poptorch.identity_loss(x, reduction="none") is x
    assert poptorch.identity_loss(x) is x


@pytest.mark.spec("executor", 47)
@pytest.mark.spec("ops", 6)
def test_gradients_flow_through_identity_loss_outside_a_wrapper() -> None:
    x = torch.randn(3, requires_grad=True)

    poptorch.identity_loss(x * 2, "mean").backward()

    torch.testing.assert_close(x.grad, torch.full((3,), 2 / 3))


@pytest.mark.spec("executor", 47)
@pytest.mark.spec("ops", 6)
def test_identity_loss_refuses_another_reduction() -> None:
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(torch.randn(3), "max")


def test_inference_mode_is_named() -> None:
    with torch.inference_mode(), pytest.raises(poptorch.Error, match="inference_mode"):
        step(model_of(mse), lanes=1)
