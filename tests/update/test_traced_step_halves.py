"""Traced steps that compute in bfloat16 or float16 round like the optimizer in eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import traced_optimizers as traced
from helpers.cases import slow_but
from helpers.closeness import near, relative
from helpers.wrapping import Having, options

T = torch.optim
STEPS, ROWS = 4, 16
RATE = 0.02099609375  # in bfloat16, too
# For `weight.add_(update, alpha=...)` in a half type, PyTorch's portable kernels round the scaled
# update before they add it. Its vector kernels, and our programs, round the sum alone.
ROUNDED_ONCE = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="without vector instructions, PyTorch rounds a scaled sum in a half type twice",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20, bias=False)
        self.last = nn.Linear(20, 3, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.last(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(scores.float(), labels)


class Arithmetic(T.Optimizer):
    """Numbers of its groups take part in all kinds of arithmetic with tensors."""

    def __init__(self, params: Any, lr: float, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - rate)
                p *= 1 - rate * group["decay"]
                p.add_(state["mean"], alpha=-rate)
                p.addcmul_(p.grad, state["mean"], value=-rate)
                p.addcdiv_(p.grad, state["mean"].abs() + 1, value=-rate)
                p -= rate * p.grad.abs() ** (1 - rate) * p.grad.sign()
                tall, wide = torch.ones_like(p[:, :2]), torch.ones_like(p[:2])
                p.addmm_(tall, wide, alpha=rate * 1e-2, beta=1 - rate * 1e-2)


class Compensated(T.Optimizer):
    """Descends, and keeps what the last sum of weight and gradient has lost in its rounding."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["lost"] = torch.zeros_like(p)
                change = -p.grad - state["lost"]
                new = p + change
                state["lost"].copy_((new - p) - change)
                p.copy_(new)


MAKE = {
    "Lion": lambda p: traced.Lion(p, lr=0.0013, weight_decay=0.1),
    "NAdam": lambda p: T.NAdam(p, lr=0.0013, weight_decay=0.1, eps=1e-4),
    "Adafactor": lambda p: T.Adafactor(p, lr=0.0013, weight_decay=0.1),
    "Arithmetic": lambda p: Arithmetic(p, lr=0.03),
}


class Pair:
    """A model that a program trains, and its copy, which eager PyTorch trains."""

    def __init__(
        self, make: Callable[..., Any], dtype: torch.dtype, backend: str = "reference"
    ) -> None:
        torch.manual_seed(0)
        self.model = Net().to(dtype)
        self.eager_model, self.dtype = copy.deepcopy(self.model), dtype
        self.optimizer, self.eager_optimizer = (
            make(each.parameters()) for each in (self.model, self.eager_model)
        )
        self.training = poptorch.trainingModel(self.model, options(backend), self.optimizer)
        self._generator = torch.Generator().manual_seed(1)

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            x = torch.randn(ROWS, 12, generator=self._generator).to(self.dtype)
            labels = torch.randint(3, (ROWS,), generator=self._generator)
            self.training(x, labels)
            self.eager_optimizer.zero_grad()
            self.eager_model(x, labels).backward()
            self.eager_optimizer.step()

    def change(self, **numbers: Any) -> None:
        for optimizer in (self.optimizer, self.eager_optimizer):
            optimizer.param_groups[0].update(numbers)
        self.training.setOptimizer(self.optimizer)

    def program(self) -> Any:
        return self.training._session.now.compiled

    def assert_alike(self, **bounds: Any) -> None:
        torch.testing.assert_close(self.model.state_dict(), self.eager_model.state_dict(), **bounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("Adafactor", marks=ROUNDED_ONCE), "Lion", "NAdam"])
@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float16], torch.bfloat16))
def test_weights_in_half_are_bit_for_bit_those_of_eager_torch(
    name: str, dtype: torch.dtype
) -> None:
    pair = Pair(MAKE[name], dtype)
    pair.steps()
    pair.assert_alike(rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_in_half_with_numbers_of_groups_rounds_once(dtype: torch.dtype) -> None:
    pair = Pair(MAKE["Arithmetic"], dtype)
    pair.steps()
    pair.assert_alike(**near(1, STEPS, dtype=dtype))


@pytest.mark.larger("test_weights_in_half_are_bit_for_bit_those_of_eager_torch")
@pytest.mark.parametrize("name", ["NAdam", "Arithmetic"])
def test_compiled_steps_of_weights_in_half_are_those_of_eager_torch_within_rounding(
    name: str,
) -> None:
    pair = Pair(MAKE[name], torch.bfloat16, "inductor")
    pair.steps()
    pair.assert_alike(rtol=0, atol=relative(1, STEPS, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_what_a_sum_in_half_has_lost_is_that_of_eager_torch(backend: str) -> None:
    pair = Pair(lambda p: Compensated(p, {}), torch.bfloat16, backend)
    pair.steps()

    lost = pair.optimizer.state_dict()["state"][0]["lost"]
    expected = pair.eager_optimizer.state_dict()["state"][0]["lost"]
    assert expected.count_nonzero() > 0
    torch.testing.assert_close(lost, expected, rtol=0, atol=0)


def test_products_of_muon_in_bfloat16_round_like_those_of_eager_torch() -> None:
    pair = Pair(lambda p: T.Muon(p, lr=0.02), torch.float32)
    pair.steps()
    pair.assert_alike(**near(ROWS, STEPS))


def test_factors_of_products_in_half_may_change() -> None:
    pair = Pair(lambda p: T.Muon(p, lr=0.02), torch.float32)
    pair.steps(1)
    pair.change(ns_coefficients=(3.0, -4.0, 2.0))
    pair.steps(1)
    pair.assert_alike(**near(ROWS, 2))


def test_a_rate_that_scales_a_product_in_half_changes_without_another_program() -> None:
    pair = Pair(MAKE["Arithmetic"], torch.bfloat16)
    pair.steps(1)
    before = pair.program()
    pair.change(lr=0.02)
    pair.steps(1)
    assert pair.program() is before
    pair.assert_alike(**near(1, 2, dtype=torch.bfloat16))


def weighted_sum(model: Having, x: torch.Tensor) -> Any:
    return poptorch.identity_loss((model.weight * x).float().sum(), reduction="sum")


def muon_step(weight: Any, gradient: torch.Tensor, train: Any, **settings: Any) -> Any:
    """Return a weight after one step of Muon that gets a given gradient."""
    weight = nn.Parameter(weight.clone())
    optimizer = T.Muon([weight], weight_decay=0.0, **settings)
    model = Having(weighted_sum, weight=weight)
    train(model, optimizer, gradient)
    return weight.detach()


def train_in_eager(model: Having, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    model(gradient).backward()
    optimizer.step()


def train_by_program(
    model: Having, optimizer: torch.optim.Optimizer, gradient: torch.Tensor
) -> None:
    poptorch.trainingModel(model, options().checkAgainstEager("off"), optimizer)(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 20), (24, 6)])
def test_muon_on_bfloat16_weights_is_as_close_to_float64_as_eager_torch(shape: Any) -> None:
    # PyTorch rounds `weight.add_(update, alpha=-lr)` twice where its vector kernels do not apply:
    # for transposed updates, and for the last elements. Our programs round once everywhere.
    torch.manual_seed(0)
    weight, gradient = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    ratio = max(1.0, shape[0] / shape[1]) ** 0.5  # by which Muon scales the rate: 1 or 2
    update = muon_step(torch.zeros_like(weight), gradient, train_in_eager, lr=1 / ratio)

    ours = muon_step(weight, gradient, train_by_program, lr=RATE)
    eager = muon_step(weight, gradient, train_in_eager, lr=RATE)

    exact = weight.double() + RATE * ratio * update.double()
    assert torch.equal(ours, exact.bfloat16())
    assert ((ours - exact).abs() <= (eager - exact).abs()).all()
