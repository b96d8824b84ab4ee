"""Train a transformer in four pipeline stages; show its plan and what it would cost on IPUs.

python examples/pipeline/train.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
LENGTH, ROWS, STEPS = 32, 4, 8


class Net(nn.Module):
    """Four layers, one on each IPU, that predict a missing letter. ``forward`` returns the loss."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(width, letters)
        for ipu in range(1, 4):
            poptorch.BeginBlock(self.layers[ipu], f"layer {ipu}", ipu_id=ipu)

    def forward(self, text: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.letter(text)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, LENGTH // 2]), hidden)


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Show the plan and its cost, train both versions and return their results."""
    arguments = side_by_side.parser(__doc__).parse_args(words)
    text = TEXT.read_text()
    letters = ["", *sorted(set(text))]
    numbers = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    batches = []
    for _ in range(2 if arguments.small else 20):
        starts = torch.randint(len(numbers) - LENGTH, (ROWS * STEPS, 1)) + torch.arange(LENGTH)
        hidden = numbers[starts[:, LENGTH // 2]]
        batches.append((numbers[starts].index_fill(1, torch.tensor([LENGTH // 2]), 0), hidden))
    options = poptorch.Options()
    options.Training.gradientAccumulation(STEPS)  # a pipeline of four stages needs at least 7
    model = Net(len(letters))
    shown = poptorch.trainingModel(model, options.clone(), torch.optim.Adam(model.parameters()))
    shown.compile(*batches[0])
    print(shown.plan(), shown.estimate(*batches[0], system="bow:4"), "", sep="\n")
    shown.destroy()
    runs = side_by_side.compare(
        model,
        lambda net: torch.optim.Adam(net.parameters(), lr=1e-3),
        batches,
        2 if arguments.small else 5,
        options,
    )
    side_by_side.finish(runs, arguments, f"four stages, {STEPS} micro-batches of {ROWS}")
    return runs


if __name__ == "__main__":
    main()
