"""Values that an optimizer's own ``step`` changes, as the user reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Regression, options

Group = dict[str, Any]
Change = Callable[[Group], None]


class Changing(torch.optim.Optimizer):
    """Changes its groups in each step with a function."""

    def __init__(self, parameters: Any, change: Change, **values: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **values})
        self.change = change
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            self.change(group)
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["half"] = state["step"] / 2
                parameter.sub_(parameter.grad / self.count, alpha=group["lr"])


def add_one(group: Group) -> None:
    group["k"] = group.get("k", 0) + 1


def halve_a_number(group: Group) -> None:
    group["k"] = group["k"] // 2


def change_a_pair(group: Group) -> None:
    whole, part = group["pair"]
    group["pair"] = whole + 1, part * 0.5


def scale_by_a_float(group: Group) -> None:
    group["k"] = group["k"] * 1.5


CHANGES: dict[str, tuple[Change, Group]] = {
    "an int of the group": (add_one, {"k": 0}),
    "an int that the step makes": (add_one, {}),
    "divided": (halve_a_number, {"k": 100}),
    "in a tuple": (change_a_pair, {"pair": (1, 1.0)}),
    "it becomes a float": (scale_by_a_float, {"k": 1}),
}


@pytest.mark.parametrize(("change", "values"), CHANGES.values(), ids=CHANGES)
def test_numbers_that_a_step_changes_keep_their_type(change: Change, values: Group) -> None:
    def make(parameters: Any) -> Changing:
        return Changing(parameters, change, **values)

    both = EagerPair(Regression(), make, options(), **near(FUNCTION + 6, 4))
    both.step(torch.randn(3, 4), torch.randn(3, 2), count=3)

    theirs, ours = (repr(optimizer.state_dict()) for optimizer in both.both)
    assert ours == theirs
    assert type(both.ours.count) is int
    both.compare()


def scale_of_each_call(optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> list[float]:
    """Return by what an automatic factor multiplies the losses of four calls of a half model.

    The state of the optimizer is loaded into the optimizer itself after the second call.
    """
    model = Regression().half()
    optimizer = optimizer_of(model.parameters())
    opts = options()
    opts.anchorTensor("scale", "finalLossScale")
    opts.Training.setAutomaticLossScaling(True)
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    x, y = torch.randn(3, 4).half(), torch.randn(3, 2).half()
    scales = []
    for call in range(4):
        wrapped(x, y)
        scales.append(float(wrapped.getAnchoredTensor("scale")))
        if call == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return scales


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=1e-2),
        lambda parameters: Changing(parameters, add_one, lr=1e-3),
    ],
    ids=["Adam of torch", "a traced step"],
)
def test_state_that_is_loaded_leaves_the_automatic_factor_of_the_loss_as_it_is(
    optimizer_of: Callable[[Any], torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    """The factor is state of the device that no optimizer of torch has."""
    scales = scale_of_each_call(optimizer_of)

    assert scales == [1.0, 2.0, 4.0, 8.0]
    assert caplog.text == ""
