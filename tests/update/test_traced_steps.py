"""Updates that are traced from an optimizer's own ``step``, in all that an update takes part in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import exported
from helpers.closeness import near
from helpers.traced_steps import (
    CASES,
    ROUNDINGS,
    ROWS,
    STEPS,
    Frozen,
    Net,
    Pair,
    of,
    scheduled,
    step_eagerly,
    wrapped,
)
from helpers.wrapping import options

T = torch.optim


class DividingByTrained(T.Optimizer):
    """Divides the rate by the number of weights that are trained."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        rate = 1 / sum(each.requires_grad for each in weights)
        for each in weights:
            if each.requires_grad:
                each.sub_(each.grad, alpha=rate)


def test_a_step_sees_which_parameters_are_frozen() -> None:
    pair = Pair(lambda model: DividingByTrained(model.parameters(), {}), kind=Frozen)
    pair.steps(2)
    pair.assert_alike()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NAdam", "LARS", "ScheduledAdam"])
def test_device_iterations_are_steps_one_after_another(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    eager_model = copy.deepcopy(model)
    optimizer, eager_optimizer = CASES[name](model), CASES[name](eager_model)
    training = poptorch.trainingModel(model, options(iterations=4), optimizer)
    x, labels = torch.randn(16, 6), torch.randint(3, (16,))
    training(x, labels)
    for part in zip(x.chunk(4), labels.chunk(4), strict=True):
        step_eagerly(eager_model, eager_optimizer, part)
    torch.testing.assert_close(model.state_dict(), eager_model.state_dict(), **near(ROUNDINGS, 4))


# The first one, which make test runs, is compiled in half of the time of the second one.
EVERYWHERE = ["CountingGroups", "LARS", "ScheduledAdam", "NAdam", "Adagrad"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYWHERE)
def test_an_exported_update_computes_the_same_as_the_program(name: str, tmp_path: Path) -> None:
    pair = Pair(CASES[name])
    batch = pair.batch()
    pair.training.compile(*batch)
    pair.training.export(tmp_path / "step.py")
    module = exported.loaded(tmp_path / "step.py")
    (weights, *state), given = module.load(tmp_path / "step.safetensors")
    pair.training(*given)
    module.step(weights, *state, *given)
    for path, weight in pair.model.named_parameters():
        torch.testing.assert_close(weights[path], weight.detach(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CountingGroups", "LARS", "Adafactor", "OneNorm"])
def test_stages_on_several_chips_step_like_eager_torch(name: str) -> None:
    class InBlocks(Net):
        def forward(
            self, x: torch.Tensor, labels: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with poptorch.Block("first", ipu_id=0):
                hidden = torch.tanh(self.first(x))
            with poptorch.Block("last", ipu_id=1):
                scores = self.last(hidden)
                return scores, nn.functional.cross_entropy(scores, labels)

    pair = Pair(CASES[name], "staged", InBlocks)
    pair.steps(3)
    pair.assert_alike()


def program_of(pair: Pair) -> Any:
    return pair.training._session.now.compiled


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.3}])
def test_numbers_in_arithmetic_change_without_another_program(
    change: dict[str, Any],
) -> None:
    pair = Pair(CASES["Lion"])
    pair.step()
    before = program_of(pair)
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.param_groups[0].update(change)
    pair.training.setOptimizer(pair.optimizer)
    pair.step()
    assert program_of(pair) is before
    pair.assert_alike()


def test_a_number_in_a_condition_needs_another_program_when_it_changes() -> None:
    pair = Pair(of(T.Adamax, lr=0.01))
    pair.step()
    before = program_of(pair)
    for optimizer in (pair.optimizer, pair.eager_optimizer):
        optimizer.param_groups[1]["weight_decay"] = 0.5
    pair.training.setOptimizer(pair.optimizer)
    pair.step()
    assert program_of(pair) is not before
    pair.assert_alike()


def test_several_optimizers_of_a_class_each_step_their_groups() -> None:
    def both(model: Net) -> list[torch.optim.Optimizer]:
        return [
            T.NAdam(model.first.parameters(), lr=0.01),
            T.NAdam(model.last.parameters(), lr=0.02),
        ]

    torch.manual_seed(0)
    model = Net()
    eager_model = copy.deepcopy(model)
    training = wrapped(model, both(model))
    eager_optimizer = both(eager_model)
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    for _ in range(3):
        training(x, labels)
        eager_model.zero_grad()
        eager_model(x, labels)[1].backward()
        for each in eager_optimizer:
            each.step()
    torch.testing.assert_close(model.state_dict(), eager_model.state_dict(), **near(ROUNDINGS, 3))


def test_gradients_are_clipped_before_a_traced_step() -> None:
    def clipping(model: Net) -> torch.optim.Optimizer:
        optimizer = of(T.NAdam, lr=0.01)(model)
        optimizer.max_grad_norm = 0.05
        return optimizer

    pair = Pair(clipping)
    for _ in range(3):
        batch = pair.batch()
        pair.training(*batch)
        pair.eager_model.zero_grad()
        pair.eager_model(*batch)[1].backward()
        nn.utils.clip_grad_norm_(pair.eager_model.parameters(), 0.05)
        pair.eager_optimizer.step()
    pair.assert_alike()


@pytest.mark.larger("test_device_iterations_are_steps_one_after_another")
@pytest.mark.parametrize("name", CASES)
def test_compiled_steps_with_a_schedule_are_those_of_eager_torch(name: str) -> None:
    pair = Pair(CASES[name], "inductor")
    schedules = [scheduled(each) for each in (pair.optimizer, pair.eager_optimizer)]

    for _ in range(STEPS):
        pair.step()
        for schedule in filter(None, schedules):
            schedule.step()
        pair.training.setOptimizer(pair.optimizer)

    pair.assert_alike()
