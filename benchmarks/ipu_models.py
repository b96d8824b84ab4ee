"""The models of the published results, written in plain torch from public configurations.

The sizes are those of Google's BERT and of the ResNet paper. Placement and loop counts are those of
the configurations that were published with the results.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Layer(nn.Module):
    """One layer of BERT."""

    def __init__(self, hidden: int, heads: int, wide: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.intermediate = nn.Linear(hidden, wide)
        self.output = nn.Linear(wide, hidden)
        self.output_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape

        def split(value: torch.Tensor) -> torch.Tensor:
            return value.view(rows, length, self.heads, -1).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(hidden // self.heads) + mask
        attended = self.dropout(torch.softmax(scores, -1)) @ value
        joined = attended.transpose(1, 2).reshape(rows, length, hidden)
        x = self.norm(x + self.dropout(self.out(joined)))
        wide = F.gelu(self.intermediate(x))
        x = self.output_norm(x + self.dropout(self.output(wide)))
        return poptorch.recomputationCheckpoint(x) if self.training else x


class Embeddings(nn.Module):
    """Embeddings of words, positions and token types."""

    def __init__(self, vocabulary: int, hidden: int, positions: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.kinds = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.words(tokens) + self.positions(places) + self.kinds(kinds)
        return self.dropout(self.norm(x))


class Bert(nn.Module):
    """BERT's encoder."""

    def __init__(self, layers: int, hidden: int, vocabulary: int = 30400) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, hidden // 64, 4 * hidden) for _ in range(layers))

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor
    ) -> torch.Tensor:
        x = self.embeddings(tokens, kinds)
        bias = ((1 - mask.to(x.dtype)) * -1000.0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Head(nn.Module):
    """Predicts masked words, with the weights of the embedding, and the next sentence."""

    def __init__(self, hidden: int, words: nn.Parameter) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.pooler, self.sentence = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.words = words
        self.bias = nn.Parameter(torch.zeros(words.shape[0]))

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, labels: torch.Tensor, follows: torch.Tensor
    ) -> torch.Tensor:
        index = places[:, :, None].expand(-1, -1, x.shape[-1])
        picked = self.norm(F.gelu(self.dense(torch.gather(x, 1, index))))
        scores = F.linear(picked, self.words, self.bias)
        masked = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        first = self.sentence(torch.tanh(self.pooler(x[:, 0])))
        return poptorch.identity_loss(
            masked + F.cross_entropy(first.float(), follows), reduction="none"
        )


class Pretraining(nn.Module):
    """BERT with both of its pretraining tasks."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.bert = Bert(layers, hidden)
        self.head = Head(hidden, self.bert.embeddings.words.weight)

    def forward(self, tokens, mask, kinds, places, labels, follows):  # type: ignore[no-untyped-def]
        return self.head(self.bert(tokens, mask, kinds), places, labels, follows)


class Answers(nn.Module):
    """BERT that finds the start and the end of an answer."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.bert = Bert(layers, hidden)
        self.head = nn.Linear(hidden, 2)

    def forward(self, tokens, mask, kinds, start, end):  # type: ignore[no-untyped-def]
        first, last = self.head(self.bert(tokens, mask, kinds)).float().unbind(-1)
        loss = F.cross_entropy(first, start) + F.cross_entropy(last, end)
        return poptorch.identity_loss(loss, reduction="none")


class Gpt2(nn.Module):
    """GPT-2 with its loss. Its layers are those of BERT, with a causal mask."""

    def __init__(self, layers: int, hidden: int, vocabulary: int = 50257) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(1024, hidden)
        self.layers = nn.ModuleList(Layer(hidden, hidden // 64, 4 * hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.positions(torch.arange(length))
        mask = torch.full((length, length), -1000.0, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def on_chips(bert: Bert | Gpt2, layers_per_ipu: list[int]) -> None:
    """Assign layers to chips. The embeddings are on the chip of the first layer."""
    begins = 0
    for ipu, count in enumerate(layers_per_ipu):
        if ipu:
            poptorch.BeginBlock(bert.layers[begins], f"ipu{ipu}", ipu_id=ipu)
        begins += count


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = poptorch.recomputationCheckpoint if self.training else (lambda value: value)
        inner = keep(self.conv1(x))
        inner = keep(self.conv2(F.relu(self.norm1(inner))))
        inner = self.norm3(self.conv3(F.relu(self.norm2(inner))))
        return keep(F.relu(inner + self.shortcut(x)))


class ResNet50(nn.Module):
    """ResNet-50 for images of 224 x 224, which arrive as 8-bit integers, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, before = [], 64
        for level, count in enumerate((3, 4, 6, 3)):
            for at in range(count):
                blocks.append(Bottleneck(before, 64 << level, 2 if level and not at else 1))
                before = 256 << level
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(self.conv.weight.dtype) / 255
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1)
        x = self.head(self.blocks(x).mean((2, 3)))
        return F.cross_entropy(x.float(), y)


class TutorialCnn(nn.Module):
    """The CNN of PopTorch's tutorials, with its loss: for 28 x 28, or 128 x 128 (10.1 M MACs).

    Args:
        size: of the images.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 12, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1, self.fc2 = nn.Linear(12 * ((size - 2) // 2 - 4) ** 2, 100), nn.Linear(100, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.norm(F.relu(self.conv2(x))).flatten(1)
        x = torch.log_softmax(self.fc2(F.relu(self.fc1(x))), -1)
        return x, F.nll_loss(x, y)


class Mnist(nn.Module):
    """The CNN of the MNIST tutorial, tested."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(64 * 49, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))
