"""A step is traced for one weight of each kind, and other weights of this kind get the same update.

Weights are of the same kind if they have the same shape and the step updates them in the same way.
The results do not show for how many weights a step was traced, so the optimizers count them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers import traced_optimizers as own
from helpers.closeness import FUNCTION, near
from helpers.wrapping import unchecked
from poptorch._update import repeated_operators

T = torch.optim
STEPS, ROWS, LAYERS = 4, 8, 5
WEIGHTS, KINDS = 2 * LAYERS + 2, 4


class Watched:
    """An optimizer that records how many weights had gradients in its last step, which is traced if
    nothing is compared with eager PyTorch.
    """

    with_gradients = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        Watched.with_gradients = sum(p.grad is not None for p in params)
        return super().step(closure)


class WithRate(T.Optimizer):
    """Subtracts the normalised gradient, times what ``rate`` of a subclass returns for the weight.

    The norm reads the gradient as a whole. Weights are therefore not joined to bundles, which would
    also reduce the number of traced weights.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * self.rate(place, p, group))


class Plain(WithRate):
    def rate(
        self,
        place: int,
        p: torch.Tensor,
        group: dict[str, Any],
    ) -> float | torch.Tensor:
        return group["lr"]


class ByPlace(WithRate):
    """Later weights have smaller rates."""

    def rate(
        self,
        place: int,
        p: torch.Tensor,
        group: dict[str, Any],
    ) -> float | torch.Tensor:
        return group["lr"] * 0.9**place


class WithOneException(WithRate):
    def rate(
        self,
        place: int,
        p: torch.Tensor,
        group: dict[str, Any],
    ) -> float | torch.Tensor:
        return group["lr"] * (2 if place == 4 else 1)


class WithAttributes(WithRate):
    def rate(self, place: Any, p: Any, group: Any) -> Any:
        return group["lr"] * getattr(p, "scale", 1.0)


class PerGradient(WithRate):
    """The rate depends on how many weights have gradients."""

    def rate(self, place: Any, p: Any, group: Any) -> Any:
        return group["lr"] / sum(each.grad is not None for each in group["params"])


class NeedingAll(WithRate):
    """It fails without some of its weights."""

    def rate(self, place: Any, p: Any, group: Any) -> Any:
        last = group["params"][WEIGHTS - 1]
        return group["lr"] * last.grad.numel()


class OfZeros(WithRate):
    """The sign of a zero decides about the sign of the rate."""

    def rate(self, place: Any, p: Any, group: Any) -> Any:
        zero = -0.0 if place == 4 else 0.0
        return group["lr"] * torch.copysign(torch.ones(()), torch.full((), zero))


class Neighbours(WithRate):
    """A weight's step depends on the one before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            before = 0.0
            for p in group["params"]:
                if p.grad is not None:
                    norm = p.grad.norm()
                    p.sub_(p.grad * group["lr"] / (1 + before))
                    before = norm


class MomentumOfFirst(WithRate):
    """An optimizer whose first step differs from later ones."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" in state:
                    state["buffer"].mul_(0.9).add_(p.grad)
                else:
                    state["buffer"] = p.grad.clone()
                p.sub_(state["buffer"] / p.grad.norm() * group["lr"])


class TwoNames(WithRate):
    """The state of a weight has two names for the same memory."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["flat mean"] = state["mean"].view(-1)
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(state["flat mean"].view_as(p) * group["lr"])


class AskingNorms(WithRate):
    def rate(self, place: Any, p: Any, group: Any) -> Any:
        return group["lr"] if p.norm() > 1 else 0.5 * group["lr"]


def trained(
    cls, optimizer: Callable[..., Any] = lambda cls, model: cls(model.parameters(), lr=0.02)
) -> tuple[own.Deep, own.Deep, int]:
    """Return a model after some steps, and its twin from eager torch."""
    torch.manual_seed(0)
    model = own.Deep(LAYERS)
    eager_model = copy.deepcopy(model)
    for each in (model, eager_model):
        each.layers[2].weight.scale = 3.0
    watched = type(cls.__name__, (Watched, cls), {})
    training = poptorch.trainingModel(model, unchecked(), optimizer(watched, model))
    eager = optimizer(cls, eager_model)
    seen = []
    for seed in range(STEPS):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, 6, generator=generator)
        labels = torch.randint(3, (ROWS,), generator=generator)
        training(x, labels)
        seen.append(Watched.with_gradients)
        eager.zero_grad()
        eager_model(x, labels).backward()
        eager.step()
    return model, eager_model, seen[-1]


def assert_alike(got: own.Deep, want: own.Deep) -> None:
    bounds = near(LAYERS * (6 + 2 * FUNCTION), STEPS)
    torch.testing.assert_close(got.state_dict(), want.state_dict(), **bounds)


ALIKE = {
    "Plain": Plain,
    "Adafactor": T.Adafactor,
    "LARS": own.LARS,
    "MomentumOfFirst": MomentumOfFirst,
    "AskingNorms": AskingNorms,
}
EACH = {
    "WithOneException": WithOneException,
    "OfZeros": OfZeros,
    "ByPlace": ByPlace,
    "PerGradient": PerGradient,
    "NeedingAll": NeedingAll,
    "Neighbours": Neighbours,
    "TwoNames": TwoNames,
}


@pytest.mark.parametrize("name", ALIKE)
def test_one_weight_of_each_shape_is_traced_if_all_have_the_same_update(name: str) -> None:
    model, eager_model, traced = trained(ALIKE[name])
    assert traced == KINDS
    assert_alike(model, eager_model)


class DependingOnShape(WithRate):
    """Functions whose results have another shape than their arguments, for some shapes."""

    def rate(self, place: Any, p: Any, group: Any) -> Any:
        flat = p.grad.flatten() * 2.0
        least = flat.view_as(p).clone().clamp(max=0.5).sum_to_size(p.shape[-1:]).mul(0.1)
        chosen = torch.where(least > 0.0, least, least.abs()).reshape(-1).contiguous()
        return group["lr"] * (1.0 + chosen.mean() + p.squeeze().float().neg().numel() * 1e-3)


def test_functions_that_depend_on_the_shape_are_computed_for_each_shape() -> None:
    model, eager_model, traced = trained(DependingOnShape)
    assert traced == KINDS
    assert_alike(model, eager_model)


def test_pointwise_functions_are_computed_once_for_all_matrices_and_once_for_all_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []
    usual = repeated_operators.Repeats._computed

    def counting(self: Any, known: Any, *rest: Any) -> Any:
        computed.append(self._wholes._origins.forms[known.number][0])
        return usual(self, known, *rest)

    monkeypatch.setattr(repeated_operators.Repeats, "_computed", counting)
    trained(Plain)

    assert computed.count("sub_") == 2


def test_a_weight_with_another_update_is_traced_too() -> None:
    model, eager_model, traced = trained(WithAttributes)
    assert traced == KINDS + 1
    assert_alike(model, eager_model)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_all_weights_are_traced_where_a_step_of_some_is_another_one(name: str) -> None:
    model, eager_model, traced = trained(EACH[name])
    assert traced == WEIGHTS
    assert_alike(model, eager_model)


def test_weights_of_two_groups_are_of_different_kinds() -> None:
    def in_groups(cls, model: own.Deep) -> torch.optim.Optimizer:
        params = [*model.parameters()]
        return cls([{"params": params[:4]}, {"params": params[4:], "lr": 0.5}], lr=0.02)

    model, eager_model, traced = trained(Plain, in_groups)
    assert traced == KINDS + 2
    assert_alike(model, eager_model)
