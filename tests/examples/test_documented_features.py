"""What the guide's pages on porting, wrapping and features show, run here beside eager torch.

Source: PopTorch user guide, "From PyTorch to PopTorch", "Features" (of 1.0 and 2.0), and the
introduction of a course that ports a FashionMNIST classifier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapped import options

X, Y = torch.randn(16, 6), torch.randn(16, 3)
LABELS = torch.randint(0, 3, (16,))
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Plain(nn.Module):
    """A model as it comes from a library: no loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x)


class WithLoss(nn.Module):
    """The wrapper class of the course, around any model and any loss."""

    def __init__(self, model: nn.Module, criterion: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, x, labels=None):
        output = self.model(x)
        return output if labels is None else (output, self.criterion(output, labels))


def loop(model: nn.Module, loss: Loss, x, y, updates=1, steps=1, lr=0.1) -> nn.Module:
    """Return a copy trained by the native loop."""
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=lr)
    for xs, ys in zip(x.chunk(updates), y.chunk(updates), strict=True):
        optimizer.zero_grad()
        for part in zip(xs.chunk(steps), ys.chunk(steps), strict=True):
            (loss(eager, *part) / steps).backward()
        optimizer.step()
    return eager


def assert_same(model: nn.Module, eager: nn.Module) -> None:
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


@pytest.fixture(autouse=True)
def _on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")  # for wrappers that take no options


@pytest.mark.parametrize("form", ["keywords", "positions", "replicas"])
def test_a_training_model_of_the_first_release(form: str) -> None:
    model = Plain()
    eager = loop(model, mse, X, Y, updates=2, steps=4)
    if form == "positions":
        wrapped = poptorch.trainingModel(model, 2, 4, 1, False, True, nn.MSELoss(), sgd(model))
    else:
        replicas = 2 if form == "replicas" else 1
        wrapped = poptorch.trainingModel(
            model,
            device_iterations=2,
            gradient_accumulation=4 // replicas,
            replication_factor=replicas,
            loss=nn.MSELoss(),
            optimizer=sgd(model),
        )
    output, loss = wrapped(X, Y)
    assert_same(model, eager)
    replicas = len(loss) if loss.dim() else 1
    assert output.shape == (2 * replicas, 3)  # the last micro-batch of each replica


def test_an_inference_model_of_the_first_release() -> None:
    model = Plain()
    for wrapped in (
        poptorch.inferenceModel(model, 2, 2),
        poptorch.inferenceModel(model, device_iterations=2, replication_factor=2, profile=False),
    ):
        torch.testing.assert_close(wrapped(X), model(X))


def test_a_model_from_a_library_with_its_loss_around_it() -> None:
    model = WithLoss(Plain(), nn.CrossEntropyLoss())
    eager = loop(model, lambda m, x, y: m(x, y)[1], X, LABELS)
    poptorch.trainingModel(model, options=options(), optimizer=sgd(model))(X, LABELS)
    assert_same(model, eager)
    torch.testing.assert_close(poptorch.inferenceModel(model, options())(X), eager(X))


def test_devices_come_in_powers_of_two() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                with poptorch.Block(ipu_id=number):
                    x = layer(x)
            return x

    model = Three()
    with pytest.raises(poptorch.Error, match="power of 2"):
        poptorch.inferenceModel(model, options(iterations=4))(X)
    rounded = options(iterations=4).autoRoundNumIPUs(True)
    torch.testing.assert_close(poptorch.inferenceModel(model, rounded)(X), model(X))


class Classifier(nn.Module):
    """The classifier of the course; its normalisation over the batch is as it stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(1, 5, 3), nn.MaxPool2d(2, 2)
        self.conv2, self.norm = nn.Conv2d(5, 12, 5), nn.GroupNorm(3, 12)
        self.fc1, self.relu, self.fc2 = nn.Linear(972, 100), nn.ReLU(), nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=0)

    def forward(self, x):
        x = self.pool(self.relu(self.conv1(x)))
        x = torch.flatten(self.norm(self.relu(self.conv2(x))), start_dim=1)
        return self.log_softmax(self.fc2(self.relu(self.fc1(x))))


@pytest.mark.slow
def test_the_classifier_of_the_course_with_a_loader() -> None:
    model = WithLoss(Classifier(), nn.NLLLoss()).train()
    eager = copy.deepcopy(model)
    opts = options(iterations=2, accumulation=2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,)))
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
    native = torch.optim.SGD(eager.parameters(), lr=0.01, momentum=0.9)
    for x, labels in poptorch.DataLoader(opts, data, batch_size=4, shuffle=True):
        training(x, labels)
        for xs, ys in zip(x.chunk(2), labels.chunk(2), strict=True):
            native.zero_grad()
            for part in zip(xs.chunk(2), ys.chunk(2), strict=True):
                (eager(*part)[1] / 2).backward()
            native.step()
    assert_same(model, eager)
