"""The update of a new program is compared with the ``step`` of the user's own optimizer."""

from __future__ import annotations

import copy
import dataclasses
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import traced_optimizers as own
from helpers.wrapping import options


@pytest.fixture(autouse=True)
def _nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Model(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(3, outputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return out, F.mse_loss(out, torch.zeros_like(out))


def train_once(kind: type[torch.optim.Optimizer], **settings: Any) -> torch.Tensor:
    model = Model()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
    _, loss = wrapped(torch.randn(4, 3))
    return loss


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, torch.Tensor], Any]) -> None:
    """Let updates of programs write something else; ``change`` gets a key and the right value."""
    lower = pkgutil.resolve_name("poptorch._update.lower")

    def lowered(*args: Any, **settings: Any) -> Any:
        made = lower(*args, **settings)

        def function(tensors: Any) -> Any:
            return {key: change(key, value) for key, value in made.function(tensors).items()}

        return dataclasses.replace(made, function=function)

    monkeypatch.setattr("poptorch._update.lower", lowered)


def larger_weights(key: str, value: torch.Tensor) -> torch.Tensor:
    return value * 1.001 if key.startswith("param") else value


def half_the_velocity(key: str, value: torch.Tensor) -> torch.Tensor:
    return value / 2 if key.startswith("optstate.velocity") else value


def real_velocity(key: str, value: torch.Tensor) -> torch.Tensor:
    return value.real + 0j if key.startswith("optstate.velocity") else value


@pytest.mark.parametrize(
    "kind, settings",
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_updates_that_agree_cause_no_warning(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    assert train_once(kind, **settings).isfinite()


def train_in_half() -> torch.Tensor:
    """Train float16 weights with Adam, which divides by the square roots of small squares."""
    torch.manual_seed(0)
    model = Model(outputs=512).half()
    nn.init.zeros_(model.layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
    _, loss = wrapped(torch.randn(4, 3, dtype=torch.float16))
    return loss


def test_an_update_that_is_more_exact_than_eagers_is_not_a_difference() -> None:
    """Eager's squares of small gradients are zero in float16; the program divides before."""
    assert train_in_half().isfinite()


def test_another_weight_in_half_precision_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda key, value: value * 1.1 if key.startswith("param") else value)

    with pytest.raises(poptorch.Error, match="does not agree with the optimizer"):
        train_in_half()


class InHalf(torch.optim.Optimizer):
    """Rounds its update of float32 weights to bfloat16, as Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.bfloat16(), alpha=group["lr"])

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


def test_a_difference_of_the_rounding_in_which_a_step_computes_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda key, value: value * 1.00002 if key.startswith("param") else value)

    assert train_once(InHalf).isfinite()


def test_another_update_of_a_step_that_computes_in_half_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda key, value: value * 1.1 if key.startswith("param") else value)

    with pytest.raises(poptorch.Error, match="does not agree with the optimizer"):
        train_once(InHalf)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradient_clipping_is_not_a_difference(kind: type[torch.optim.Optimizer]) -> None:
    model = Model()
    optimizer: Any = kind(model.parameters(), lr=0.1)
    optimizer.max_grad_norm = 0.01
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)

    _, loss = wrapped(torch.randn(4, 3))

    assert loss.isfinite()


def test_another_weight_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, larger_weights)

    with pytest.raises(poptorch.Error, match=r"'layer.bias' after 3 updates differs by"):
        train_once(torch.optim.SGD)


def test_other_state_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, half_the_velocity)

    with pytest.raises(poptorch.Error, match=r"'momentum_buffer' of 'layer.bias' differs by"):
        train_once(torch.optim.SGD, momentum=0.9)


def test_the_optimizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, larger_weights)

    with pytest.raises(poptorch.Error, match="RMSprop"):
        train_once(torch.optim.RMSprop)


def test_state_of_complex_weights_without_imaginary_parts_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((self.weight * x).abs().square(), reduction="mean")

    plant(monkeypatch, real_velocity)
    model = Fourier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)

    with pytest.raises(poptorch.Error, match=r"'momentum_buffer' of 'weight' differs by"):
        wrapped(torch.randn(4, 3))


def test_the_users_optimizer_is_not_stepped() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
    before = model.layer.weight.detach().clone()

    wrapped.compile(torch.randn(4, 3))

    assert torch.equal(model.layer.weight, before)


# Updates that were compared before.


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the optimizers whose updates were compared."""
    names = []
    usual = pkgutil.resolve_name("poptorch._eager.update_differences")

    def compare(request: Any, spec: Any, optimizer: Any) -> Any:
        names.append(type(optimizer.optimizer).__name__)
        return usual(request, spec, optimizer)

    monkeypatch.setattr("poptorch._eager.update_differences", compare)
    return names


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, own.Lion])
def test_an_update_that_was_compared_is_not_compared_again(
    kind: type[torch.optim.Optimizer], comparisons: list[str]
) -> None:
    train_once(kind)
    train_once(kind)

    assert comparisons == [kind.__name__]


def test_an_update_with_another_learning_rate_is_not_compared_again(comparisons: list[str]) -> None:
    for rate in (0.1, 0.2):
        model = Model()
        optimizer = torch.optim.NAdam(model.parameters(), lr=rate)
        wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
        wrapped.compile(torch.randn(4, 3))

    assert comparisons == ["NAdam"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("settings", [{"maximize": True}, {"eps": 1e-3}, {"foreach": True}])
def test_an_optimizer_with_other_settings_is_compared(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], comparisons: list[str]
) -> None:
    train_once(kind)

    train_once(kind, **settings)

    assert comparisons == [kind.__name__] * 2


def test_another_update_of_the_same_optimizer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    train_once(torch.optim.NAdam)
    plant(monkeypatch, larger_weights)

    with pytest.raises(poptorch.Error, match="differs by"):
        train_once(torch.optim.NAdam)


def test_an_optimizer_that_was_not_compared_is_compared_later(comparisons: list[str]) -> None:
    """The first one has already made steps, so its formula cannot be compared."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3))[1].backward()
    optimizer.step()
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
    wrapped.compile(torch.randn(4, 3))

    train_once(torch.optim.AdamW)

    assert comparisons == ["AdamW"] * 2


# Updates that are traced from a step.


class ByIdentity(torch.optim.Optimizer):
    """Distinguishes parameters by ``is``, which does not work in a traced step."""

    def __init__(self, params: Any, layer: nn.Module) -> None:
        super().__init__(params, {"lr": 0.1})
        self.layer = layer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (0.1 if p is self.layer.weight else 1.0))


def half_the_mean(key: str, value: torch.Tensor) -> torch.Tensor:
    return value / 2 if key.startswith("optstate.exp_avg.") else value


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adafactor, own.Lion, own.LARS])
def test_another_weight_of_a_traced_update_is_an_error(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, larger_weights)

    with pytest.raises(poptorch.Error, match=r"'layer.\w+' after 3 updates differs by"):
        train_once(kind)


def test_other_state_of_a_traced_update_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, half_the_mean)

    with pytest.raises(poptorch.Error, match=r"'exp_avg' of 'layer.\w+' differs by"):
        train_once(torch.optim.NAdam)


def test_a_step_that_depends_on_the_identity_of_parameters_is_noticed() -> None:
    model = Model()
    optimizer = ByIdentity(model.parameters(), model.layer)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)

    with pytest.raises(poptorch.Error, match=r"'layer.weight' after 3 updates differs by"):
        wrapped(torch.randn(4, 3))


def test_an_optimizer_that_holds_a_layer_is_compared_each_time(comparisons: list[str]) -> None:
    """Its step may depend on the layer of a parameter, which no stored value describes."""
    for _ in range(2):
        model = Model()
        optimizer = ByIdentity(model.parameters(), nn.Linear(3, 3))
        wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
        wrapped.compile(torch.randn(4, 3))

    assert comparisons == ["ByIdentity"] * 2


def test_a_traced_update_that_continues_from_steps_in_eager_torch_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, half_the_mean)
    model = Model()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3))[1].backward()
    optimizer.step()
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)

    with pytest.raises(poptorch.Error, match=r"'exp_avg' of 'layer.\w+' differs by"):
        wrapped(torch.randn(4, 3))


def test_the_comparison_of_a_traced_update_leaves_the_optimizer_and_the_weights_as_they_were() -> (
    None
):
    model = Model()
    optimizer = own.Lookahead(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = poptorch.trainingModel(model, options().checkAgainstEager("error"), optimizer)
    before = copy.deepcopy(model.state_dict())
    gradient = model.layer.weight.grad = torch.ones(3, 3)

    wrapped.compile(torch.randn(4, 3))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.layer.weight.grad is gradient
    assert optimizer.count == 0
    assert not optimizer.state_dict()["state"]
