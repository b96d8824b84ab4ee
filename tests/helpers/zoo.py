"""Small models, one per thing that capture must get right, with inputs for one micro-batch of 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import poptorch

ROWS = 4


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        out = self.layer(x)
        return out, self.loss(out, y)


class ConvBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x, y):
        out = self.head(self.norm(self.conv(x)).relu_().flatten(1))
        return out, F.cross_entropy(out, y)


class BatchNorms(nn.Module):
    """One batch norm called twice, one in eval mode, one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.twice, self.frozen = nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3).eval()
        self.plain = nn.BatchNorm1d(3, track_running_stats=False)

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x, y):
        out = self.plain(self.frozen(self.twice(self.twice(self.head(x)) + 1) * 2))
        return out, F.mse_loss(out, y)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens, y):
        out = F.log_softmax(self.head(self.table(tokens).mean(1)), 1)
        return out, F.nll_loss(out, y)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x, y):
        out = self.head(self.rnn(x)[0][:, -1])
        return out, F.cross_entropy(out, y)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, y):
        out = self.head(self.block(x).mean(1))
        return out, F.cross_entropy(out, y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, y):
        out = self.head(self.table(tokens).sum(1))
        return out, F.cross_entropy(out, y)


class Counter(nn.Module):
    """A floating buffer changed in place, a constant tensor attribute, an identity loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x, y):
        self.steps += 1
        out = self.layer(x) * self.scale / (1 + 0.1 * self.steps)
        return out, poptorch.identity_loss((out - y).abs(), reduction="mean")


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x, y):
        out = self.second(self.drop(self.first(x).relu()))
        return out, F.mse_loss(out, y)


@dataclass(frozen=True)
class Example:
    """A model and how to make its inputs.

    Attributes:
        build: makes the model.
        inputs: makes inputs for a number of rows.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def _classes(rows: int, count: int = 3) -> torch.Tensor:
    return torch.randint(0, count, (rows,))


def _sequence(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, width), _classes(rows)


ZOO = {
    "linear": Example(Linear, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "conv_batchnorm": Example(ConvBatchNorm, lambda n: (torch.randn(n, 2, 6, 6), _classes(n))),
    "batchnorms": Example(BatchNorms, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "embedding": Example(Embedding, lambda n: (torch.randint(0, 11, (n, 4)), _classes(n))),
    "lstm": Example(Lstm, lambda n: _sequence(n, 5)),
    "transformer": Example(Transformer, lambda n: _sequence(n, 8)),
    "tied": Example(Tied, lambda n: (torch.randint(0, 11, (n, 4)), _classes(n, 11))),
    "counter": Example(Counter, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "dropout": Example(Dropout, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
}
