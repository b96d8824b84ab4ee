"""Small models, one per thing that capture must get right, with inputs for one micro-batch of 4."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having

ROWS = 4


def scored(forward: Callable, loss: Callable[..., torch.Tensor], **layers: nn.Module) -> nn.Module:
    """A model that returns what a function makes of its layers and an input, and its loss."""

    def both(model: Having, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = forward(model, x)
        return out, loss(out, y)

    return Having(both, **layers)


def linear() -> nn.Module:
    return scored(lambda m, x: m.layer(x), nn.MSELoss(), layer=nn.Linear(6, 3))


def conv_batch_norm() -> nn.Module:
    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.norm(m.conv(x)).relu_().flatten(1))

    layers = {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(64, 3)}
    return scored(forward, F.cross_entropy, **layers)


class BatchNorms(nn.Module):
    """One batch norm called twice, one in eval mode, one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.twice, self.frozen = nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3).eval()
        self.plain = nn.BatchNorm1d(3, track_running_stats=False)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.plain(self.frozen(self.twice(self.twice(self.head(x)) + 1) * 2))
        return out, F.mse_loss(out, y)


def embedding() -> nn.Module:
    layers = {"table": nn.Embedding(11, 5), "head": nn.Linear(5, 3)}
    return scored(lambda m, x: F.log_softmax(m.head(m.table(x).mean(1)), 1), F.nll_loss, **layers)


def lstm() -> nn.Module:
    rnn, head = nn.LSTM(5, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)
    return scored(lambda m, x: m.head(m.rnn(x)[0][:, -1]), F.cross_entropy, rnn=rnn, head=head)


def transformer() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    head = nn.Linear(8, 3)
    return scored(lambda m, x: m.head(m.block(x).mean(1)), F.cross_entropy, block=block, head=head)


def tied() -> nn.Module:
    table, head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
    head.weight = table.weight
    return scored(lambda m, x: m.head(m.table(x).sum(1)), F.cross_entropy, table=table, head=head)


def dropout() -> nn.Module:
    layers = {"first": nn.Linear(6, 16), "second": nn.Linear(16, 3)}
    return scored(
        lambda m, x: m.second(F.dropout(m.first(x).relu(), 0.4, m.training)), F.mse_loss, **layers
    )


class Counter(nn.Module):
    """A floating buffer changed in place, a constant tensor attribute, an identity loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.steps += 1
        out = self.layer(x) * self.scale / (1 + 0.1 * self.steps)
        return out, poptorch.identity_loss((out - y).abs(), reduction="mean")


@dataclass(frozen=True)
class Example:
    """A function that makes a model, and one that makes its inputs for a number of rows."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def _classes(rows: int, count: int = 3) -> torch.Tensor:
    return torch.randint(0, count, (rows,))


def _sequence(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, width), _classes(rows)


ZOO = {
    "linear": Example(linear, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "conv_batchnorm": Example(conv_batch_norm, lambda n: (torch.randn(n, 2, 6, 6), _classes(n))),
    "batchnorms": Example(BatchNorms, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "embedding": Example(embedding, lambda n: (torch.randint(0, 11, (n, 4)), _classes(n))),
    "lstm": Example(lstm, lambda n: _sequence(n, 5)),
    "transformer": Example(transformer, lambda n: _sequence(n, 8)),
    "tied": Example(tied, lambda n: (torch.randint(0, 11, (n, 4)), _classes(n, 11))),
    "counter": Example(Counter, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
    "dropout": Example(dropout, lambda n: (torch.randn(n, 6), torch.randn(n, 3))),
}
