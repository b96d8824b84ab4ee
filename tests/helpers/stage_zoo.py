"""Models in n blocks, b0 to b(n-1), one for each thing that cutting into stages must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import poptorch

ROWS = 2
WIDTH = 4


class Staged(nn.Module):
    """Runs its layers one by one, each in a block of its own; the loss is in the last block."""

    def __init__(self, blocks: int, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(blocks))
        self.chips = list(range(blocks))

    def forward(self, x, y):
        x = self.run(x)
        return x, F.mse_loss(x, y)

    def run(self, x):
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x)
        return x


class Mlp(Staged):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


class ConvNet(Staged):
    """Convolutions without bias before batch norms, whose statistics must stay in order."""

    def __init__(self, blocks: int) -> None:
        super().__init__(
            blocks,
            lambda: nn.Sequential(
                nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU()
            ),
        )


class Transformer(Staged):
    def __init__(self, blocks: int) -> None:
        super().__init__(
            blocks, lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        )


class Skip(Mlp):
    """The first block's result is read by all others."""

    def run(self, x):
        first = None
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x) if first is None else layer(x) + first.sin()
            first = x if first is None else first
        return x


class Tied(Mlp):
    """The first and the last block share the embedding, so that they must be on one device."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, tokens, y):
        poptorch.Block.start("b0", 0)
        x = self.run(self.table(tokens).mean(1))
        return x, F.cross_entropy(x @ self.table.weight.t(), y)


@dataclass(frozen=True)
class Example:
    """A model of n blocks, inputs for a number of rows, and the device of each block."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    chips: Callable[[int], list[int]] = lambda n: list(range(n))


def _normal(*shape: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rows: (torch.randn(rows, *shape), torch.randn(rows, *shape))


def _tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 7, (rows, 3)), torch.randint(0, 7, (rows,))


STAGE_ZOO = {
    "mlp": Example(Mlp, _normal(WIDTH)),
    "conv_net": Example(ConvNet, _normal(2, 5, 5)),
    "transformer": Example(Transformer, _normal(3, 4)),
    "skip": Example(Skip, _normal(WIDTH)),
    "tied": Example(Tied, _tokens, lambda n: [*range(n - 1), 0]),
}
