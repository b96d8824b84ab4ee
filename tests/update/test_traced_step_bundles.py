"""Traced steps over bundles of small weights: nothing of it can be noticed but speed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import traced_optimizers as traced
from helpers.closeness import FUNCTION, near
from helpers.wrapping import options

T = torch.optim
STEPS, ROWS, LAYERS = 4, 8, 10


class Decaying(T.Optimizer):
    """Only matrices decay: what is done depends on the number of dimensions."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.mul_(0.99)
                p.sub_(p.grad, alpha=group["lr"])


class ByPlace(T.Optimizer):
    """Later weights have smaller rates."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                p.sub_(p.grad, alpha=group["lr"] * 0.9**place)


def matrices_of(model: traced.Deep) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.dim() > 1]


def trained(
    make: Callable[..., Any] | type,
    params: Callable[..., Any] = lambda model: [*model.parameters()],
) -> tuple[Any, ...]:
    """Return a model after some steps, its copy in eager PyTorch, their optimizers, the program."""
    torch.manual_seed(0)
    model = traced.Deep(LAYERS)
    eager_model = copy.deepcopy(model)
    first, second = (make(params(each)) for each in (model, eager_model))
    training = poptorch.trainingModel(model, options(), first)
    for seed in range(STEPS):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, 6, generator=generator)
        labels = torch.randint(3, (ROWS,), generator=generator)
        training(x, labels)
        second.zero_grad()
        eager_model(x, labels).backward()
        second.step()
    return model, eager_model, first, second, training._session.now.compiled.plan.program


def assert_alike(got: nn.Module, expected_value: nn.Module) -> None:
    bounds = near(LAYERS * (6 + 2 * FUNCTION), STEPS)
    torch.testing.assert_close(got.state_dict(), expected_value.state_dict(), **bounds)


BUNDLED = {
    "NAdam": lambda p: T.NAdam(p, lr=0.01),
    "Adagrad": lambda p: T.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "AdamW, amsgrad": lambda p: T.AdamW(p, lr=0.01, amsgrad=True),
    "Rprop": T.Rprop,
    "Lion": lambda p: traced.Lion(p, lr=0.01, weight_decay=0.1),
    "ScheduledAdam": traced.ScheduledAdam,
    "Lookahead": lambda p: traced.Lookahead(p, momentum=0.9),
    "CountingGroups": lambda p: traced.CountingGroups(p, lr=0.1),
}
ALONE = {
    "LARS": lambda p: traced.LARS(p, lr=0.1),
    "Adafactor": lambda p: T.Adafactor(p, lr=0.01),
    "OneNorm": traced.OneNorm,
    "ByPlace": ByPlace,
}


@pytest.fixture(scope="module", params=BUNDLED)
def bundled(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Return what ``trained`` returns for an optimizer that updates small weights as one."""
    return trained(BUNDLED[request.param])


def test_small_weights_with_the_same_update_are_updated_as_one(bundled: tuple[Any, ...]) -> None:
    model, eager_model, *_, program = bundled
    assert len(program.bundles) == 1
    assert_alike(model, eager_model)


def test_the_state_of_weights_in_a_bundle_is_that_of_eager_torch(
    bundled: tuple[Any, ...],
) -> None:
    _, _, first, second, _ = bundled
    bounds = near(LAYERS * (6 + 2 * FUNCTION), STEPS)
    got, expected_value = first.state_dict()["state"], second.state_dict()["state"]
    torch.testing.assert_close(got, expected_value, **bounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_weights_that_the_step_looks_at_as_a_whole_are_updated_one_by_one(name: str) -> None:
    model, eager_model, *_, program = trained(ALONE[name])
    assert not program.bundles
    assert_alike(model, eager_model)


def test_a_step_that_asks_for_dimensions_is_not_run_on_a_flat_tensor() -> None:
    model, eager_model, *_, program = trained(
        Decaying, lambda model: [*matrices_of(model), model.last.bias]
    )
    assert not program.bundles
    assert_alike(model, eager_model)


def test_only_the_weights_that_most_others_are_like_are_in_a_bundle() -> None:
    class Two(traced.Deep):
        def __init__(self) -> None:
            super().__init__(LAYERS)
            self.more = nn.ParameterList(nn.Parameter(torch.ones(6)) for _ in range(2 * LAYERS))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x * sum(self.more) / len(self.more), labels)

    torch.manual_seed(0)
    model = Two()
    eager_model = copy.deepcopy(model)
    optimizers = Decaying(model.parameters()), Decaying(eager_model.parameters())
    training = poptorch.trainingModel(model, options(), optimizers[0])
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    for _ in range(STEPS):
        training(x, labels)
        optimizers[1].zero_grad()
        eager_model(x, labels).backward()
        optimizers[1].step()
    (bundle,) = training._session.now.compiled.plan.program.bundles
    assert all(len(member.slot.shape) == 1 for member in bundle.members)
    assert_alike(model, eager_model)
