"""A warning names attributes that ``forward`` changes and reads in the next run."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.wrapping import Having, options


@pytest.fixture(autouse=True)
def _nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class WarmUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * min(1.0, self.step / 10)


class Ready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self._ready = nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._ready:
            self._ready = True
            x = x - x.mean()
        return self.layer(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.previous
        self.previous = x[0].detach()
        return out


class Anchored(nn.Module):
    """Compares its weight with the one that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(3, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        if self.first is None:
            self.first = weight.detach().clone()
        return F.mse_loss(self.layer(x), x) + (weight - self.first).square().sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(3, 3), (torch.zeros(3), torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, cell = self.state
        out = self.layer(x + hidden) + cell
        self.state = (out[0].detach(), out[1].detach())
        return F.mse_loss(out, x)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.means = nn.Linear(3, 3), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.means.append(out.mean().detach())
        return F.mse_loss(out, x) * torch.stack(self.means).mean()


class Settings(nn.Module):
    """Keeps what it computes in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3), types.SimpleNamespace(first=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept.first is None:
            self.kept.first = self.layer.bias.detach().clone()
        return F.mse_loss(self.layer(x) - self.kept.first, x)


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(3, 3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.activation(self.layer(x))
        self.activation = nn.Tanh()
        return F.mse_loss(out, x)


class Averaging(nn.Module):
    """Counts its runs, and assigns to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(3, 3), 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return F.mse_loss(self.layer(x - self.mean), x)


class Configured(nn.Module):
    """Several layers share settings that it changes, and only its own scale has an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = types.SimpleNamespace(kind=None, count=0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
        for layer in self.layers:
            layer.settings = self.settings
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.settings.kind = "regression"
        self.settings.count += 1
        loss = F.mse_loss(sum(layer(x) for layer in self.layers) * self.scale, x)
        self.scale = 0.5
        return loss


class Doubting(nn.Module):
    """Only both of its attributes together have an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(3, 3), False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) * (2.0 if self.first and self.second else 1.0)
        self.first = self.second = True
        return F.mse_loss(out, x)


class Noting(nn.Module):
    """Stores tensors in attributes, for users who inspect the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.means = nn.Linear(3, 3), None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x)
        self.means.append(self.last.mean())
        return F.mse_loss(self.last, x)


def train(model: nn.Module, mode: str = "error", steps: int = 1) -> None:
    opts = options(accumulation=1).checkAgainstEager(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    torch.manual_seed(0)
    for _ in range(steps):
        wrapped(torch.randn(4, 3))


def infer(model: nn.Module) -> Any:
    return poptorch.inferenceModel(model, options().checkAgainstEager("error"))(torch.randn(4, 3))


@pytest.mark.parametrize(
    "model, name", [(WarmUp(), "step"), (Ready(), "_ready"), (Remembering(), "previous")]
)
def test_an_attribute_that_decides_the_next_run_is_named(model: nn.Module, name: str) -> None:
    with pytest.raises(poptorch.Error, match=f"Got:    {name};"):
        infer(model)


@pytest.mark.parametrize(
    "model, name",
    [
        (Anchored(), "first"),
        (Recurrent(), "state"),
        (Growing(), "means"),
        (Settings(), "kept"),
        (Swapping(), "activation"),
    ],
)
def test_attributes_that_a_training_model_keeps_for_the_next_run_are_named(
    model: nn.Module, name: str
) -> None:
    with pytest.raises(poptorch.Error, match=f"Got:    {name};"):
        train(model)


def test_only_the_attribute_that_changes_the_results_is_named() -> None:
    with pytest.raises(poptorch.Error, match="Got:    scale;"):
        train(Configured())


def test_all_changed_attributes_are_named_if_none_alone_changes_the_results() -> None:
    with pytest.raises(poptorch.Error, match="Got:    first, second;"):
        train(Doubting())


def test_a_counter_next_to_an_assigned_buffer_causes_no_warning() -> None:
    model = Averaging()

    train(model)

    assert model.mean.abs().max() > 0


def test_results_that_training_stores_for_others_are_not_a_difference() -> None:
    model = Having(lambda self, x: self.noting(x), noting=Noting())

    train(model)

    assert len(model.noting.means) == 1


def test_attributes_of_layers_have_the_values_of_the_first_run_in_eager_pytorch() -> None:
    model = Having(lambda self, x: self.noting(x), noting=Noting())
    expected = copy.deepcopy(model.noting)
    torch.manual_seed(0)
    expected(torch.randn(4, 3))

    train(model)

    torch.testing.assert_close(model.noting.last, expected.last.detach())


def test_a_copy_of_a_fixed_weight_is_not_a_difference() -> None:
    model = Anchored()
    model.layer.weight.requires_grad_(False)

    train(model)

    assert type(model.layer.weight) is nn.Parameter


def test_a_copy_of_a_weight_in_inference_is_not_a_difference() -> None:
    loss = infer(Anchored())

    assert loss.isfinite()


def test_the_line_that_changes_an_attribute_is_named() -> None:
    with pytest.raises(poptorch.Error, match=r"self.step \+= 1"):
        infer(WarmUp())


def test_an_attribute_that_nothing_reads_is_not_a_difference() -> None:
    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        return x + 1

    out = infer(Having(count, calls=0, shapes=[]))

    assert out.shape == (4, 3)


def test_a_mask_that_is_made_once_is_not_a_difference() -> None:
    def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.tensor([1.0, 0.0, 1.0])
        return x * self.mask

    out = infer(Having(masked, mask=None))

    assert out.shape == (4, 3)


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_a_layer_that_the_first_run_replaces_by_an_equal_one_is_not_a_difference(
    rate: float,
) -> None:
    def settled(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.is_settled:
            copied = nn.Linear(3, 3)  # draws initial values, which the copy overwrites
            copied.weight, copied.bias = self.layer.weight, self.layer.bias
            self.layer, self.is_settled = copied, True
        return nn.functional.dropout(self.layer(x), rate)

    out = infer(Having(settled, layer=nn.Linear(3, 3), is_settled=False))

    assert out.shape == (4, 3)


class Cache(nn.Module):
    """Keeps rows at positions that each call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[(x[0, :1] > 0).long()] = x[:1]
        return x + self.rows.sum(0)


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.previous = nn.Linear(3, 3), [torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) - self.previous[0]
        self.previous[0].copy_(x.detach().mean(0))
        return F.mse_loss(out, x)


class Unregistered(nn.Module):
    """Keeps a tensor in an attribute that is not a buffer."""

    def __init__(self, function: Any, **attributes: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        vars(self).update(attributes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.runs += 1
    return x * self.runs


def averaging(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - self.mean


@pytest.mark.parametrize(
    "model, name",
    [
        (Cache(), "rows"),
        (Unregistered(counting, runs=torch.zeros(())), "runs"),
        (Unregistered(averaging, mean=torch.zeros(3)), "mean"),
    ],
)
def test_a_tensor_that_forward_changes_in_place_for_the_next_run_is_named(
    model: nn.Module, name: str
) -> None:
    with pytest.raises(poptorch.Error, match=f"Got:    {name};"):
        infer(model)


def test_a_tensor_in_a_list_that_a_training_model_changes_in_place_is_named() -> None:
    with pytest.raises(poptorch.Error, match="Got:    previous;"):
        train(Velocity())


def test_a_tensor_outside_of_the_model_that_forward_changes_in_place_is_named() -> None:
    runs = torch.zeros(1)

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        runs.add_(1)
        return x * runs

    with pytest.raises(poptorch.Error, match=r"Got:    tensors outside of the model"):
        infer(Having(counted))


def test_the_first_run_uses_the_value_that_a_changed_tensor_had_before() -> None:
    model = Unregistered(counting, runs=torch.zeros(()))
    x = torch.randn(4, 3)
    expected = copy.deepcopy(model)(x)

    out = poptorch.inferenceModel(model, options().checkAgainstEager("off"))(x)

    torch.testing.assert_close(out, expected)


def written_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scratch[:4] = x
    return x + self.scratch.sum(0)


def written_again(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scratch[0] = 0
    return x + self.scratch.sum(0)


def only_written(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scratch[0].lerp_(x[0], 0.5)
    return x + 1


@pytest.mark.parametrize("forward", [written_first, written_again, only_written])
def test_a_tensor_whose_changes_do_not_affect_the_next_run_is_not_a_difference(
    forward: Any,
) -> None:
    model = Unregistered(forward, scratch=torch.ones(5, 3))
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    expected = copy.deepcopy(model)(x)
    torch.manual_seed(0)

    out = infer(model)

    torch.testing.assert_close(out, expected)


def test_a_counter_is_found_even_if_the_same_program_was_compared_before() -> None:
    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.1

    def warming_up(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * (self.runs * 0.1)

    infer(Having(scaled))

    with pytest.raises(poptorch.Error, match="Got:    runs;"):
        infer(Having(warming_up, runs=0))


def test_attributes_that_only_work_together_are_found() -> None:
    def anchored(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = x.mean(0)
            self.second = self.first * 2
        return x - self.second

    with pytest.raises(poptorch.Error, match="Got:    first;"):
        infer(Having(anchored, first=None, second=None))
