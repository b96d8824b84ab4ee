"""Optimizers whose state has tensors that share memory."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Regression, options

State = dict[str, Any]
Step = Callable[[nn.Parameter, State, float], None]


class Stepping(torch.optim.Optimizer):
    """Calls a function for each parameter, with its state and the learning rate."""

    def __init__(self, parameters: Any, function: Step) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.function(parameter, self.state[parameter], group["lr"])


def two_names(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["one"] = torch.zeros_like(p)
        state["two"] = state["one"]
    state["one"].mul_(0.9).add_(p.grad)
    p.sub_(state["two"], alpha=lr)


def two_entries_of_a_list(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["both"] = [torch.zeros_like(p)] * 2
    state["both"][0].mul_(0.9).add_(p.grad)
    p.sub_(state["both"][1], alpha=lr)


def rows_of_a_buffer(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["both"] = torch.zeros(2, *p.shape)
        state["mean"], state["square"] = state["both"]
    state["mean"].mul_(0.9).add_(p.grad)
    state["square"].mul_(0.9).addcmul_(p.grad, p.grad)
    p.sub_(state["both"][0] / (state["both"][1].sqrt() + 1), alpha=lr)


def transposed(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["mean"] = torch.zeros_like(p)
        state["turned"] = state["mean"].T if p.dim() == 2 else state["mean"]
    state["turned"].mul_(0.9).add_(p.grad.T if p.dim() == 2 else p.grad)
    p.sub_(state["mean"], alpha=lr)


def columns_next_to_each_other(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["mean"], state["square"] = torch.zeros(*p.shape, 2).unbind(-1)
    state["mean"].mul_(0.9).add_(p.grad)
    state["square"].mul_(0.9).addcmul_(p.grad, p.grad)
    p.sub_(state["mean"] / (state["square"].sqrt() + 1), alpha=lr)


def the_flat_weight(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["flat"] = p.detach().view(-1)
    state["flat"].sub_(p.grad.view(-1), alpha=lr)


def the_detached_weight(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["weight"] = p.detach()
    p.sub_(p.grad, alpha=lr)
    p.sub_(state["weight"], alpha=0.1)


def assigned_in_each_step(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["now"] = torch.zeros_like(p)
    state["now"].mul_(0.9).add_(p.grad)
    state["last"] = state["now"]
    p.sub_(state["last"], alpha=lr)


def exchanged_in_each_step(p: nn.Parameter, state: State, lr: float) -> None:
    if not state:
        state["one"], state["two"] = torch.zeros_like(p), torch.ones_like(p)
    state["one"], state["two"] = state["two"], state["one"]
    state["one"].mul_(0.9).add_(p.grad)
    p.sub_(state["two"], alpha=lr)


STEPS = [
    two_names,
    two_entries_of_a_list,
    rows_of_a_buffer,
    transposed,
    columns_next_to_each_other,
    the_flat_weight,
    the_detached_weight,
    assigned_in_each_step,
    exchanged_in_each_step,
]


def pair(function: Step) -> EagerPair:
    opts = options().checkAgainstEager("error")
    return EagerPair(Regression(), lambda ps: Stepping(ps, function), opts, **near(FUNCTION + 6, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(3, 2)


@pytest.mark.parametrize("function", STEPS)
def test_a_step_that_writes_to_one_tensor_changes_the_other_one(function: Step) -> None:
    both = pair(function)
    for _ in range(4):
        both.step(*batch())

    both.compare()


@pytest.mark.parametrize("function", STEPS)
def test_state_that_shares_memory_before_the_first_call_does_so_in_the_program(
    function: Step,
) -> None:
    both = pair(function)
    inputs = batch()
    for each, mine in ((both.model, both.ours), (both.eager, both.theirs)):
        each(*inputs).backward()
        mine.step()
    for _ in range(3):
        both.step(*batch())

    both.compare()


def test_state_that_is_read_shares_memory_again() -> None:
    both = pair(rows_of_a_buffer)
    both.step(*batch(), count=2)
    weight = both.model.layer.weight

    state = both.ours.state[weight]
    state["mean"].fill_(7)

    assert state["both"][0].eq(7).all()


def test_training_goes_on_in_eager_pytorch_with_the_shared_memory() -> None:
    both = pair(two_names)
    both.step(*batch(), count=2)
    both.wrapped.detachFromDevice()
    inputs = batch()

    both.eager_step(*inputs)
    both.model.zero_grad()
    both.model(*inputs).backward()
    both.ours.step()

    both.compare()


def test_one_tensor_in_the_state_of_all_weights_counts_for_all() -> None:
    class Shared(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            (group,) = self.param_groups
            first = self.state[group["params"][0]]
            total = first["total"] if first else torch.zeros(1)
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("total", total).add_(parameter.grad.norm())
                parameter.sub_(parameter.grad * state["total"], alpha=group["lr"])

    opts = options().checkAgainstEager("error")
    both = EagerPair(
        Regression(), lambda ps: Shared(ps, {"lr": 0.1}), opts, **near(FUNCTION + 6, 4)
    )
    for _ in range(4):
        both.step(*batch())

    both.compare()


def test_a_column_of_another_tensor_is_refused() -> None:
    def column(p: nn.Parameter, state: State, lr: float) -> None:
        if not state:
            state["both"] = torch.zeros(*p.shape, 2)
            state["mean"] = state["both"][..., 0]
        state["mean"].mul_(0.9).add_(p.grad)
        p.sub_(state["both"][..., 0], alpha=lr)

    both = pair(column)
    before = copy.deepcopy(both.model.state_dict())

    with pytest.raises(poptorch.Error, match=r"'mean' of 'layer\.weight'"):
        both.wrapped(*batch())

    torch.testing.assert_close(both.model.state_dict(), before)
