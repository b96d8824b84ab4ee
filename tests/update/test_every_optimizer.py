"""Every optimizer of torch, and some that people wrote, through all that an update takes part in.

Two groups, a schedule, accumulation and replicas; interpreted and compiled. In the middle, state
goes from the program to eager torch and back. The optimizers of timm run only where timm is
installed, which the tests do not install.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.traced_steps import CASES, IN_HALF, History, Make, of

T = torch.optim
REFUSED = {"LBFGS", "SparseAdam"}


# Names of timm's optimizers that need CUDA, gradients of gradients, or random numbers in a step.
NOT_TRACED = ("bnb", "fused", "adahessian", "kron")


def _of_timm() -> dict[str, Make]:
    """Return the optimizers of timm, if it is installed with what it imports."""
    if not all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        return {}
    timm: Any = importlib.import_module("timm.optim")
    names = [name for name in timm.list_optimizers() if not name.startswith(NOT_TRACED)]
    made = {name: _by_timm(timm.create_optimizer_v2, name) for name in names}
    IN_HALF.update(made[name] for name in names if "muon" in name or "adafactorbv" in name)
    return {f"{name} of timm": make for name, make in made.items()}


def _by_timm(create: Any, name: str) -> Make:
    def make(model: nn.Module) -> Any:
        first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
        groups = [{"params": first}, {"params": rest, "lr": 0.02}]
        return create(groups, opt=name, lr=0.01, weight_decay=0.05, momentum=0.9)

    return make


def with_one_flag(cls: Any, flag: str, value: bool) -> Make:
    """Return what makes an optimizer with another value of a flag in its first group."""

    def make(model: nn.Module) -> Any:
        first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
        groups = [{"params": first, flag: value}, {"params": rest}]
        return cls(groups, lr=0.01, weight_decay=0.1)

    return make


EVERY: dict[str, Make] = {
    **CASES,
    "Adam": of(T.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": of(T.AdamW, lr=0.01),
    "SGD with momentum": of(T.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "RMSprop, centred": of(T.RMSprop, lr=0.01, centered=True),
    "RMSprop, centred in one group": with_one_flag(T.RMSprop, "centered", True),
    "Adam, decoupled in one group": with_one_flag(T.Adam, "decoupled_weight_decay", True),
    "AdamW, not decoupled in one group": with_one_flag(T.AdamW, "decoupled_weight_decay", False),
    **_of_timm(),
}
# A count that is in no state_dict(), and a flag that load_state_dict() sets.
NOT_RESUMED = {"Lookahead", "AdamW, not decoupled in one group"}
RESUMED = [name for name in EVERY if name not in NOT_RESUMED]
TIERS = ["reference", "inductor"]


def test_the_cases_have_all_classes_of_torch() -> None:
    classes = {
        name
        for name, cls in vars(T).items()
        if inspect.isclass(cls) and issubclass(cls, T.Optimizer) and cls is not T.Optimizer
    }

    covered = {name.partition(",")[0] for name in EVERY} | REFUSED

    assert classes <= covered


@pytest.fixture(scope="module")
def history(request: pytest.FixtureRequest) -> Iterator[History]:
    name, backend = request.param
    made = History(EVERY[name], backend)
    yield made
    made.pair.training.destroy()


def each(names: Any) -> pytest.MarkDecorator:
    cases = [(name, backend) for backend in TIERS for name in names]
    texts = [f"{backend}-{name}" for name, backend in cases]
    return pytest.mark.parametrize("history", cases, indirect=True, ids=texts)


@pytest.mark.long
@each(EVERY)
def test_twenty_steps_with_a_schedule_are_those_of_eager_torch(history: History) -> None:
    history.assert_as_expected(history.weights)


@pytest.mark.long
@each(RESUMED)
def test_eager_torch_continues_from_the_state_of_a_program(history: History) -> None:
    weights = history.weights_of_eager_torch_from_the_state_of_the_program()

    history.assert_as_expected(weights)


@pytest.mark.long
@each(RESUMED)
def test_a_program_continues_from_the_state_of_eager_torch(history: History) -> None:
    weights = history.weights_of_the_running_program_from_the_state_of_eager_torch()

    history.assert_as_expected(weights)
