"""Three small models to train, and inputs for them."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attend(x, x, x)[0]).mean(1))


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(32, 6)


def convolutional():
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers), torch.randn(32, 1, 6, 6)


def attention():
    return Attention(), torch.randint(0, 11, (32, 5))


MODELS = {f.__name__: f for f in (perceptron, convolutional, attention)}
