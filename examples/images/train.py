"""Train a small ResNet in half precision on FashionMNIST.

python examples/images/train.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fashion_mnist"))
import data
import poptorch
import side_by_side


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.GroupNorm(4, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.GroupNorm(4, after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Classifies images. With labels, ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), Block(8, 16, 2), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.head(self.layers(x).flatten(1)).float()
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--data-dir", type=Path, default=data.SUBSET, help="default: the subset")
    arguments = parser.parse_args(words)
    images = data.load(arguments.data_dir)
    x, labels = images.train.tensors
    torch.manual_seed(0)
    order = torch.randperm(len(x))[: 128 if arguments.small else 1280]
    batches = [(x[part].half(), labels[part]) for part in order.split(64) if len(part) == 64]
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)  # of 16 images each
    model = ResNet().half()
    runs = side_by_side.compare(
        model,
        lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        batches,
        2 if arguments.small else 5,
        options,
    )
    title = f"ResNet in half precision, {len(order)} images"
    side_by_side.finish(runs, arguments, title)
    scores = poptorch.inferenceModel(model.eval())(images.test.tensors[0].half())
    right = (scores.argmax(1) == images.test.tensors[1]).float().mean()
    print(f"test accuracy {right:.1%} of {len(scores)} images")
    return runs


if __name__ == "__main__":
    main()
