"""Optimizers whose own ``step`` raises an exception if values meet a condition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Graded, Regression, options

Check = Callable[[torch.Tensor], None]
Factor = Callable[[torch.Tensor], torch.Tensor]


class Checking(torch.optim.Optimizer):
    """Calls a function with each gradient, and descends."""

    def __init__(self, parameters: Any, check: Check) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.check = check

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.check(parameter.grad)
                parameter.sub_(parameter.grad, alpha=group["lr"])


def raise_if(condition: Any) -> None:
    if condition:
        raise RuntimeError("the gradient is not finite")


def fail_unless(condition: Any) -> None:
    assert condition


def use_an_unknown_name(gradient: torch.Tensor) -> None:
    if gradient.abs().max() > 1e6:
        clip(gradient)  # type: ignore[name-defined]  # noqa: F821


def only_if_large(gradient: torch.Tensor) -> None:
    if gradient.norm() > 0:  # taken both ways
        raise_if(gradient.norm() > 1e6)
    else:
        gradient.add_(1)


CHECKS: dict[str, Check] = {
    "if": lambda gradient: raise_if(gradient.isnan().any()),
    "if not": lambda gradient: raise_if(not gradient.isfinite().all()),
    "assert": lambda gradient: fail_unless(gradient.norm() < 1e6),
    "a mistake": use_an_unknown_name,
    "inside another branch": only_if_large,
}


def pair(check: Check) -> EagerPair:
    opts = options().checkAgainstEager("error")
    return EagerPair(Regression(), lambda ps: Checking(ps, check), opts, **near(FUNCTION + 6, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(3, 2)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_branch_that_raises_is_not_taken(check: Check) -> None:
    both = pair(check)
    for _ in range(3):
        both.step(*batch())

    both.compare()


def test_a_condition_on_all_gradients_that_raises_is_not_taken() -> None:
    class Whole(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            (group,) = self.param_groups
            norms = [parameter.grad.norm() for parameter in group["params"]]
            raise_if(torch.stack(norms).norm() > 1e6)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])

    opts = options().checkAgainstEager("error")
    both = EagerPair(Regression(), lambda ps: Whole(ps, {"lr": 0.1}), opts, **near(FUNCTION + 6, 4))
    for _ in range(3):
        both.step(*batch())

    both.compare()


class Pairwise(torch.optim.Optimizer):
    """Unpacks its two weights from the third step on, and before that negates the updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        (group,) = self.param_groups
        weights, sign = group["params"], -1
        if self.steps > 2:
            first, second = weights
            weights, sign = [first, second], 1
        for weight in weights:
            weight.sub_(sign * weight.grad, alpha=group["lr"])


def test_a_step_that_fails_without_some_of_its_weights_takes_both_branches() -> None:
    """The two weights have the same update, so that the step is also tried with one of them."""
    opts = options().checkAgainstEager("error")
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    both = EagerPair(Graded(layers=layers), Pairwise, opts, **near(FUNCTION + 6, 4))
    for _ in range(5):
        both.step(torch.randn(3, 4), torch.randn(3, 4))

    both.compare()


def test_one_warning_names_the_line_and_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    both = pair(CHECKS["if"])

    both.step(*batch())

    (message,) = (text for text in caplog.messages if "does not raise exceptions" in text)
    assert "RuntimeError" in message
    assert "test_raising_steps.py" in message


def test_an_exception_in_every_branch_is_the_users() -> None:
    def check(gradient: torch.Tensor) -> None:
        sign = 1 if gradient.sum() > 0 else -1
        raise KeyError(sign)

    with pytest.raises(KeyError):
        pair(check).wrapped(*batch())


class Preconditioned(torch.optim.Optimizer):
    """Multiplies gradients by a matrix, if the sum of their products is large enough."""

    def __init__(self, parameters: Any, factor: Factor, limit: float) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.factor, self.limit = factor, limit

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["sum"] = torch.zeros(len(parameter), len(parameter))
                if state["sum"].trace() > self.limit:
                    gradient = self.factor(state["sum"]) @ gradient
                parameter.sub_(gradient, alpha=group["lr"])
                state["sum"].add_(parameter.grad.abs().sum() * torch.eye(len(parameter)))


def unlike_itself(matrix: torch.Tensor) -> torch.Tensor:
    """Return NaNs if a matrix is zero."""
    return matrix / matrix.trace()


FACTORS: dict[str, Factor] = {
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "solve": lambda matrix: torch.linalg.solve(matrix, torch.eye(len(matrix))),
    "eigh": lambda matrix: torch.linalg.eigvalsh(unlike_itself(matrix)).diag(),
    "svd": lambda matrix: torch.linalg.svdvals(unlike_itself(matrix)).diag(),
    "pinv": lambda matrix: torch.linalg.pinv(unlike_itself(matrix)),
}


def preconditioned(factor: Factor, limit: float, backend: str = "reference") -> EagerPair:
    opts = options(backend).checkAgainstEager("off")
    optimizer = lambda ps: Preconditioned(ps, factor, limit)  # noqa: E731
    return EagerPair(Regression(), optimizer, opts, **near(FUNCTION + 40, 4))


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_a_factorization_in_a_branch_that_is_not_taken_does_not_fail(factor: Factor) -> None:
    both = preconditioned(factor, limit=0.0)
    for _ in range(3):
        both.step(*batch())

    both.compare()


@pytest.mark.larger("test_a_factorization_in_a_branch_that_is_not_taken_does_not_fail")
@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_compiled_code_does_not_fail_in_a_branch_that_is_not_taken(factor: Factor) -> None:
    both = preconditioned(factor, limit=0.0, backend="inductor")
    for _ in range(3):
        both.step(*batch())

    both.compare()


def test_a_factorization_in_a_branch_that_is_taken_fails() -> None:
    both = preconditioned(torch.linalg.cholesky, limit=-1.0)

    with pytest.raises(poptorch.Error, match="cholesky"):
        both.wrapped(*batch())


def test_a_factorization_that_only_later_steps_make_does_not_fail_in_the_first_one() -> None:
    class Later(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state, gradient = self.state[parameter], parameter.grad
                    if "root" in state:
                        gradient = torch.linalg.inv(state["root"]) @ gradient
                    state["root"] = torch.eye(len(parameter)) * (1 + parameter.grad.norm())
                    parameter.sub_(gradient, alpha=group["lr"])

    opts = options().checkAgainstEager("error")
    near_eager = near(FUNCTION + 40, 4)
    both = EagerPair(Regression(), lambda ps: Later(ps, {"lr": 0.1}), opts, **near_eager)
    for _ in range(3):
        both.step(*batch())

    both.compare()
