"""What is found out from one weight of each kind is what all weights show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import traced_optimizers as own
from poptorch._ir.spec import OptimSpec
from poptorch._ir.traced_step import TracedStep
from poptorch._update import torchs_steps, traced_step_discovery
from poptorch.optim.freeze_optimizer import freeze

T = torch.optim
NOT_TRACED = {"Optimizer", "LBFGS", "SparseAdam"}
NAMES = [
    name
    for name, cls in vars(T).items()
    if inspect.isclass(cls) and issubclass(cls, T.Optimizer) and name not in NOT_TRACED
]
SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True, "maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "foreach": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=at != 1) for at in range(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.other_scale = nn.Parameter(torch.ones(()))


def groups_of(model: nn.Module, name: str) -> list[dict[str, Any]]:
    """Return two groups, with only matrices for Muon."""
    weights = [each for each in model.parameters() if name != "Muon" or each.dim() == 2]
    return [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.02}]


@pytest.fixture
def model() -> nn.Module:
    """Return a model that lives as long as the description of its optimizer."""
    return Net()


def traced(model: nn.Module, cls: Callable[..., Any], name: str, **settings: Any) -> OptimSpec:
    """Return an optimizer whose step was not looked at."""
    optimizer = cls(groups_of(model, name), **{"lr": 0.01, **settings})
    paths = {id(each): path for path, each in model.named_parameters()}
    spec, _ = freeze(optimizer, paths)
    return spec


def is_traced(name: str) -> bool:
    return traced(Net(), getattr(T, name), name, **SETTINGS.get(name, {})).traced is not None


def discovered(spec: OptimSpec) -> OptimSpec:
    return traced_step_discovery.discover(spec, lambda dtype: dtype)


def findings(step: TracedStep | None) -> TracedStep:
    """Return the findings without the order of the state, which has no meaning."""
    assert step is not None
    assert step.kept is not None
    return replace(step, kept=tuple(sorted(step.kept, key=lambda each: each.place)))


@pytest.mark.parametrize("name", [name for name in NAMES if is_traced(name)])
def test_one_weight_of_each_kind_shows_what_all_weights_show(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = traced(model, getattr(T, name), name, **SETTINGS.get(name, {}))
    found = discovered(spec)
    monkeypatch.setattr(traced_step_discovery, "examples_of", lambda spec: {})

    of_all = discovered(spec)

    assert found == of_all
    assert findings(found.traced) == findings(of_all.traced)


def test_there_are_examples_for_an_optimizer_of_torch(model: nn.Module) -> None:
    spec = traced(model, T.Adafactor, "Adafactor")

    examples = torchs_steps.examples_of(spec)

    assert len(set(examples.values())) < len(examples)


@pytest.mark.parametrize("cls", [own.Lion, type("Mine", (T.Adafactor,), {})])
def test_the_step_of_another_class_runs_on_all_weights(model: nn.Module, cls: Any) -> None:
    spec = traced(model, cls, "Lion")

    assert torchs_steps.examples_of(spec) == {}


def test_a_step_with_hooks_runs_on_all_weights(model: nn.Module) -> None:
    def hooked(*args: Any, **settings: Any) -> torch.optim.Optimizer:
        optimizer = T.Adafactor(*args, **settings)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    spec = traced(model, hooked, "Adafactor")

    assert torchs_steps.examples_of(spec) == {}
