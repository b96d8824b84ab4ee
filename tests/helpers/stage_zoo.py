"""Models in n blocks, b0 to b(n-1), one for each thing that cutting into stages must get right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
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
        return x, nn.functional.mse_loss(x, y)

    def run(self, x):
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x)
        return x


def mlp_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def conv_layer() -> nn.Module:
    """A convolution without bias before a batch norm, whose statistics must stay in order."""
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU())


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


class Skip(Staged):
    """The first block's result is read by all others."""

    def run(self, x):
        first = None
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x) if first is None else layer(x) + first.sin()
            first = x if first is None else first
        return x


class Tied(Staged):
    """The first and the last block share the embedding, so that they must be on one device."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, mlp_layer)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, tokens, y):
        poptorch.Block.start("b0", 0)
        x = self.run(self.table(tokens).mean(1))
        return x, nn.functional.cross_entropy(x @ self.table.weight.t(), y)


@dataclass(frozen=True)
class Example:
    """A model of n blocks, inputs for a number of rows, and the device of each block."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    chips: Callable[[int], list[int]] = lambda n: list(range(n))


def _normal(*shape: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rows: (torch.randn(rows, *shape), torch.randn(rows, *shape))


STAGE_ZOO = {
    "mlp": Example(lambda n: Staged(n, mlp_layer), _normal(WIDTH)),
    "conv_net": Example(lambda n: Staged(n, conv_layer), _normal(2, 5, 5)),
    "transformer": Example(lambda n: Staged(n, transformer_layer), _normal(3, 4)),
    "skip": Example(lambda n: Skip(n, mlp_layer), _normal(WIDTH)),
    "tied": Example(
        Tied,
        lambda rows: (torch.randint(0, 7, (rows, 3)), torch.randint(0, 7, (rows,))),
        lambda n: [*range(n - 1), 0],
    ),
}
