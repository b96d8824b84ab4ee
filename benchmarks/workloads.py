"""The workloads of the main speed table: models, optimizers, loop counts and required speed-ups.

A floor is the smallest allowed ratio of the time of another contestant to our time, on two idle
cores in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist"))
from poptorch_ipu import ClassificationModel, ModelWithLoss


class Block(nn.Module):
    """Two convolutions with a shortcut, as in ResNet-18."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """The architecture of ResNet-18 for images of 32 x 32, 16 channels wide, with its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, before = [], width
        for level in range(4):
            for at in range(2):
                wide = width << level
                blocks.append(Block(before, wide, 2 if level and at == 0 else 1))
                before = wide
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out, F.cross_entropy(out, y)


class Bert(nn.Module):
    """A BERT of 4 layers, hidden size 256, that predicts every token, with its loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        vocabulary, hidden, length = 1000, 256, 64
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(length, hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.encoder(self.tokens(x) + self.positions))
        return out, F.cross_entropy(out.flatten(0, 1), y.flatten())


class Autocast(nn.Module):
    """A float32 model whose products are computed in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x, y)


class Lstm(nn.Module):
    """Two LSTM layers of 128 and a classifier, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.rnn(x)[0][:, -1])
        return out, F.cross_entropy(out, y)


class Mlp(nn.Module):
    """Three linear layers, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, F.cross_entropy(out, y)


def cnn() -> nn.Module:
    """Return the tutorial's network with its loss."""
    return ModelWithLoss(ClassificationModel(), nn.NLLLoss())


def images(shape: tuple[int, ...]) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that creates a number of inputs of a shape, with labels of ten classes."""
    return lambda rows: (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and their targets."""
    return torch.randint(0, 1000, (rows, 64)), torch.randint(0, 1000, (rows, 64))


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        title: the name of the row.
        model: creates the module, whose last result is the loss.
        data: creates the inputs for a number of rows.
        micro: rows of a micro-batch.
        optimizer: a class of torch.optim; SGD has momentum. None for inference.
        accumulation, replicas, iterations: the loop counts of one call.
        precision: "bfloat16" and "float16" convert the model, "autocast" computes in bfloat16.
        floors: the required speed-up over eager and over ``torch.compile``.
        first, full: allowed seconds to the first training result, and to full speed in a second
            process; None if there is no limit.
    """

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    micro: int
    optimizer: str | None
    accumulation: int = 1
    replicas: int = 1
    iterations: int = 1
    precision: str = "float32"
    floors: tuple[float, float] = (1.0, 1.0)
    first: float | None = None
    full: float | None = None

    def module(self) -> nn.Module:
        """Return the model, always with the same weights."""
        torch.manual_seed(0)
        model = self.model()
        if self.precision == "autocast":
            return Autocast(model)
        return model.to(getattr(torch, self.precision))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the combined batch of one call."""
        torch.manual_seed(1)
        return self.data(self.micro * self.steps)

    @property
    def steps(self) -> int:
        """Return the micro-batches of one call."""
        return self.accumulation * self.replicas * self.iterations

    def settings(self) -> dict[str, Any]:
        """Return the optimizer's arguments."""
        settings = {"lr": 1e-3} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})
        if self.precision == "float16" and self.optimizer == "Adam":
            settings["eps"] = 1e-4  # the usual one is zero in float16
        return settings


_MNIST = images((1, 28, 28))
WORKLOADS = {
    "cnn": Workload(
        "tutorial CNN, 16", cnn, _MNIST, 16, "SGD", floors=(1.2, 1.5), first=1.5, full=2.0
    ),
    "cnn-1x16": Workload(
        "tutorial CNN, 1 x 16 accumulations", cnn, _MNIST, 1, "SGD", 16, floors=(7, 8)
    ),
    "cnn-16x8": Workload(
        "tutorial CNN, 16 x 8 accumulations", cnn, _MNIST, 16, "SGD", 8, floors=(1.7, 2.2)
    ),
    "cnn-replicas": Workload(
        "tutorial CNN, 4, 4 replicas", cnn, _MNIST, 4, "SGD", replicas=4, floors=(1.6, 2.0)
    ),
    "resnet": Workload(
        "ResNet-18 shape, 8 x 4", ResNet, images((3, 32, 32)), 8, "SGD", 4, floors=(1.3, 1.0)
    ),
    "bert": Workload(
        "BERT, 8, Adam", Bert, tokens, 8, "Adam", floors=(1.5, 1.2), first=4.0, full=4.0
    ),
    "bert-adafactor": Workload(
        "BERT, 8, Adafactor", Bert, tokens, 8, "Adafactor", floors=(1.2, 1.0)
    ),
    "bert-muon": Workload("BERT, 8, Muon", Bert, tokens, 8, "Muon", floors=(1.2, 1.0)),
    "bert-1x8": Workload("BERT, 1 x 8, Adam", Bert, tokens, 1, "Adam", 8, floors=(1.6, 1.4)),
    "lstm": Workload(
        "LSTM, 2 layers of 128, 4 x 4", Lstm, images((32, 64)), 4, "SGD", 4, floors=(1.2, 1.1)
    ),
    "mlp": Workload("MLP 784-512-512-10, 32, Adam", Mlp, images((784,)), 32, "Adam",
                    floors=(2.0, 1.5)),
    "bert-bfloat16": Workload(
        "BERT, 8, Adam, bfloat16 weights", Bert, tokens, 8, "Adam", precision="bfloat16"
    ),
    "bert-autocast": Workload(
        "BERT, 8, Adam, autocast to bfloat16", Bert, tokens, 8, "Adam", precision="autocast"
    ),
    "bert-float16": Workload(
        "BERT, 8, Adam, float16 weights", Bert, tokens, 8, "Adam", precision="float16"
    ),
    "cnn-inference": Workload(
        "CNN inference, 8 iterations of 4", cnn, _MNIST, 4, None, iterations=8, floors=(2, 2)
    ),
}  # fmt: skip
QUICK = ("cnn", "cnn-1x16", "mlp")
