"""State of updates that are traced from an optimizer's own ``step``: between eager and programs,
and in files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import slow_but_the_first
from helpers.traced_steps import CASES, History, Net, Pair, wrapped
from helpers.wrapping import normal, options

# The first one, which make test runs, is compiled in half of the time of the second one.
EVERYWHERE = ["CountingGroups", "LARS", "ScheduledAdam", "NAdam", "Adagrad"]
# The first of them are those that other tests use, too.
EVERY = [*EVERYWHERE, *(name for name in CASES if name not in EVERYWHERE)]
RESUMED = [name for name in EVERY if name != "Lookahead"]  # its count is in no state_dict()


@pytest.fixture(scope="module")
def history(request: pytest.FixtureRequest) -> Iterator[History]:
    made = History(CASES[request.param])
    yield made
    made.pair.training.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("history", EVERY, indirect=True)
def test_twenty_steps_with_a_schedule_are_those_of_eager_torch(history: History) -> None:
    history.assert_as_expected(history.weights)


@pytest.mark.parametrize("history", EVERY, indirect=True)
def test_state_has_the_entries_and_types_of_eager_torch(history: History) -> None:
    assert _kinds(history.ours["state"]) == _kinds(history.theirs["state"])


def _kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_kinds(each) for each in value]
    return type(value)


@pytest.mark.parametrize("history", EVERY, indirect=True)
def test_state_has_the_values_of_eager_torch(history: History) -> None:
    got, expected_value = history.ours["state"], history.theirs["state"]
    torch.testing.assert_close(got, expected_value, **history.pair.bounds)


@pytest.mark.parametrize("history", RESUMED, indirect=True)
def test_eager_torch_continues_from_the_state_of_a_program(history: History) -> None:
    weights = history.weights_of_eager_torch_from_the_state_of_the_program()

    history.assert_as_expected(weights)


@pytest.mark.parametrize("history", slow_but_the_first(RESUMED), indirect=True)
def test_a_program_continues_from_the_state_of_eager_torch(history: History) -> None:
    weights = history.weights_of_a_program_from_the_state_of_eager_torch("reference")

    history.assert_as_expected(weights)


@pytest.mark.parametrize("history", RESUMED, indirect=True)
def test_state_that_is_loaded_into_a_running_program_takes_effect(history: History) -> None:
    weights = history.weights_of_the_running_program_from_the_state_of_eager_torch()

    history.assert_as_expected(weights)


def test_counters_of_a_step_in_groups_are_current_after_a_call() -> None:
    pair = Pair(CASES["CountingGroups"])

    pair.steps(3)

    assert [group["step"] for group in pair.optimizer.param_groups] == [3, 3]


def test_counters_of_a_step_in_the_optimizer_are_current_after_a_call() -> None:
    pair = Pair(CASES["Lookahead"])

    pair.steps(3)

    assert pair.optimizer.count == 3


@pytest.mark.parametrize("history", slow_but_the_first(EVERYWHERE), indirect=True)
def test_a_saved_program_continues_with_the_state_of_its_optimizer(
    history: History, tmp_path: Path
) -> None:
    pair = history.pair
    pair.training.save(tmp_path / "model.poptorch")
    model = Net()
    optimizer = history.make(model)
    loaded = poptorch.load(tmp_path / "model.poptorch", model=model, optimizer=optimizer)

    for batch in history.later[:3]:
        pair.training(*batch)
        loaded(*batch)

    torch.testing.assert_close(model.state_dict(), pair.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("history", slow_but_the_first(EVERYWHERE), indirect=True)
def test_a_checkpoint_has_the_state_of_a_traced_optimizer(history: History, tmp_path: Path) -> None:
    pair, resumed = history.pair, Pair(history.make)
    batches = history.later[:4]
    checkpoints = poptorch.Checkpoints(tmp_path, pair.training, batches)
    for number, batch in enumerate(checkpoints.batches(1), 1):
        pair.training(*batch)
        if number == 2:
            checkpoints.save()

    resumed_run = poptorch.Checkpoints(tmp_path, resumed.training, batches)
    assert resumed_run.resume()
    for batch in resumed_run.batches(1):
        resumed.training(*batch)

    got, expected_value = resumed.model.state_dict(), pair.model.state_dict()
    torch.testing.assert_close(got, expected_value, rtol=0, atol=0)


@pytest.mark.parametrize("name", slow_but_the_first(EVERYWHERE))
def test_a_traced_optimizer_survives_detaching_and_destroying(name: str) -> None:
    pair = Pair(CASES[name])
    pair.step()
    pair.training.detachFromDevice()
    pair.training.attachToDevice()
    pair.step()
    pair.training.destroy()
    pair.training = wrapped(pair.model, pair.optimizer)

    pair.step()

    pair.assert_alike()


class Gated(torch.nn.Module):
    """Layers whose outputs are scaled by parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.gates = torch.nn.ParameterList(torch.tensor(0.1 * at) for at in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + gate * torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x, torch.ones_like(x))


@pytest.mark.parametrize("backend", ["reference", pytest.param("optimise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but_the_first(["NAdam", "Adagrad", "Adafactor", "RAdam"]))
def test_each_weight_without_dimensions_has_its_own_state(name: str, backend: str) -> None:
    eager, model = Gated(), Gated()
    theirs, ours = (getattr(torch.optim, name)(each.parameters(), 0.05) for each in (eager, model))
    training = poptorch.trainingModel(model, options().backend(backend), ours)

    for batch in normal(3, 6, 4):
        theirs.zero_grad()
        eager(batch).backward()
        theirs.step()
        training(batch)

    torch.testing.assert_close([*model.parameters()], [*eager.parameters()])
