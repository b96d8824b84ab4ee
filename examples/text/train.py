"""Train a small GPT on a text that every Debian machine has: the GNU General Public License.

python examples/text/train.py

Sizes and settings are those that nanoGPT's page suggests for a laptop's processor.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side

TEXT = Path("/usr/share/common-licenses/GPL-3")  # from the Debian package base-files
LENGTH, ROWS, WIDTH, LAYERS, HEADS = 64, 12, 128, 4, 4
Heads = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Let each letter attend to the letters before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Layer(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int, heads: Heads) -> torch.Tensor:
        parts = self.mixed(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        seen = heads(number, *parts.permute(2, 0, 3, 1, 4))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Predicts the next letter. ``forward`` returns the loss."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def scores(self, text: torch.Tensor, places: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Return a score for each possible next letter."""
        x = self.letter(text) + self.place(places)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, heads)
        return self.head(self.norm(x))

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        scores = self.scores(text, torch.arange(LENGTH), attend)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())


class Writer(nn.Module):
    """Writes one letter per call, given or written letters first.

    The keys and values of earlier letters are buffers of each layer. In a program with
    ``deviceIterations(n)``, one call writes n letters.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("last", torch.tensor([[0]]))
        self.register_buffer("seen", torch.zeros(LAYERS, 2, 1, HEADS, LENGTH, WIDTH // HEADS))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Let the letter attend to those of earlier calls."""
        self.seen[layer].index_copy_(3, self.place, torch.stack([key, value]))
        key, value = self.seen[layer]
        before = torch.arange(LENGTH)[None] <= self.place
        return F.scaled_dot_product_attention(query, key, value, before)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the number of a letter [1, 1]; ``given`` [1, 1] is a letter, or -1 for
        the last one.
        """
        letter = torch.where(given < 0, self.last, given)
        self.last.copy_(self.model.scores(letter, self.place, self.attend).argmax(-1))
        self.place.add_(1)
        return self.last.clone()


def all_anew(model: GPT, start: torch.Tensor) -> torch.Tensor:
    """Write as nanoGPT does: each letter with a pass over all letters before it."""
    text = start[None]
    while text.shape[1] < LENGTH:
        scores = model.scores(text, torch.arange(text.shape[1]), attend)
        text = torch.cat([text, scores[:, -1:].argmax(-1)], 1)
    return text.t()


def with_cache(model: GPT, given: torch.Tensor) -> torch.Tensor:
    """Write with cached keys and values, with one pass for each letter."""
    writer = Writer(copy.deepcopy(model)).eval()
    return torch.cat([writer(letter[None]) for letter in given])


def write(model: GPT, start: torch.Tensor, small: bool) -> torch.Tensor:
    """Let eager PyTorch and PopTorch continue a text, print their speeds, and return the text."""
    given = torch.full((LENGTH, 1), -1)
    given[: len(start), 0] = start
    seconds: dict[str, list[float]] = {"eager, all anew": [], "eager": [], "poptorch": []}
    options = poptorch.Options().deviceIterations(LENGTH)
    for _ in range(2 if small else 5):
        in_one_call = poptorch.inferenceModel(Writer(copy.deepcopy(model)), options.clone())
        in_one_call.compile(given)
        ways = (all_anew, model, start), (with_cache, model, given), (in_one_call, given)
        texts = []
        for (way, *arguments), times in zip(ways, seconds.values(), strict=True):
            begin = time.perf_counter()
            with torch.no_grad():
                texts.append(way(*arguments))
            times.append(time.perf_counter() - begin)
    assert torch.equal(*texts[1:])
    assert torch.equal(texts[0][len(start) :], texts[1][len(start) - 1 : -1])
    rates = {name: LENGTH / statistics.median(each) for name, each in seconds.items()}
    print(*(f"{name} writes {rate:.0f} letters/s" for name, rate in rates.items()), sep=", ")
    return texts[-1][:, 0]


def settings(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with nanoGPT's settings: only matrices decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    optimizer.max_grad_norm = 1.0  # type: ignore[attr-defined]
    return optimizer


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--text", type=Path, default=TEXT)
    arguments = parser.parse_args(words)
    text = arguments.text.read_text()
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    updates, rounds = (3, 2) if arguments.small else (40, 10)
    batches = []
    for _ in range(updates):
        starts = torch.randint(len(numbers) - LENGTH, (ROWS, 1)) + torch.arange(LENGTH)
        batches.append((numbers[starts], numbers[starts + 1]))
    warm, total = updates // 2, updates * rounds

    def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        rising = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm)
        falling = lr_scheduler.CosineAnnealingLR(optimizer, total - warm, eta_min=1e-4)
        return lr_scheduler.SequentialLR(optimizer, [rising, falling], [warm])

    model = GPT(len(letters))
    runs = side_by_side.compare(model, settings, batches, rounds, make_scheduler=cosine)
    title = f"GPT of {sum(p.numel() for p in model.parameters()):,} weights, {len(text):,} letters"
    side_by_side.finish(runs, arguments, title)
    written = write(model, numbers[:8], arguments.small)
    print("".join(letters[number] for number in written))
    return runs


if __name__ == "__main__":
    main()
