"""A small GPT on a text that every Debian machine has: the GNU General Public License.

python examples/text/train.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import side_by_side

TEXT = Path("/usr/share/common-licenses/GPL-3")  # of the package base-files
LENGTH, ROWS = 64, 16


class GPT(nn.Module):
    """Predicts the next letter; ``forward`` returns the loss."""

    def __init__(self, letters: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH)
        x = self.letter(text) + self.place(places)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        scores = self.head(self.norm(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both and return what they did."""
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--text", type=Path, default=TEXT)
    arguments = parser.parse_args(words)
    text = arguments.text.read_text()
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    updates, rounds = (3, 2) if arguments.small else (20, 5)
    batches = []
    for _ in range(updates):
        starts = torch.randint(len(numbers) - LENGTH, (ROWS, 1)) + torch.arange(LENGTH)
        batches.append((numbers[starts], numbers[starts + 1]))
    model = GPT(len(letters))
    runs = side_by_side.compare(
        model, lambda net: torch.optim.AdamW(net.parameters(), lr=2e-3), batches, rounds
    )
    title = f"GPT of {sum(p.numel() for p in model.parameters()):,} weights, {len(text):,} letters"
    side_by_side.finish(runs, arguments, title)
    return runs


if __name__ == "__main__":
    main()
