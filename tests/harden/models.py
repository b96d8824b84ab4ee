"""Small models for hard use, their batches, and what eager torch makes of them."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.wrapped import Graded, options

Args = tuple[Any, ...]
LR = 0.05
LARGE = 10.0  # of a weight: from there on rounding decides what a step of training gives


class Statistics(Graded):
    """Batch norm and perhaps dropout, trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        norm, layer = nn.BatchNorm1d(4), nn.Linear(4, 3)
        super().__init__(norm=norm, layer=layer, dropout=nn.Dropout(dropout))


class Words(nn.Module):
    """An embedding and labels, trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(self.words(x).mean(1)), y)


def gray() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))


class Variadic(nn.Module):
    """Takes anything."""

    def forward(self, *xs: torch.Tensor, **kw: torch.Tensor) -> torch.Tensor:
        return sum(xs) + sum(kw.values())  # type: ignore[return-value]


class Nested(nn.Module):
    """Takes containers and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, parts: Any, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": self.layer(parts["x"][0]) * scale, "z": parts["z"] + 1}


@dataclass(frozen=True)
class Kind:
    """A model, whether it is trained, and what makes the arguments of a call."""

    make: Callable[[], nn.Module]
    trained: bool
    batch: Callable[[], Args]


KINDS = {
    "linear": Kind(lambda: nn.Linear(4, 3), False, lambda: (torch.randn(4, 4),)),
    "statistics": Kind(Statistics, True, lambda: (torch.randn(4, 4), torch.randn(4, 3))),
    "words": Kind(Words, True, lambda: (torch.randint(7, (4, 5)), torch.randint(3, (4,)))),
    "gray": Kind(gray, False, lambda: (torch.randn(4, 1, 6, 6),)),
    "variadic": Kind(Variadic, False, lambda: (torch.randn(4, 3), torch.randn(4, 3))),
    "nested": Kind(Nested, False, lambda: ({"x": [torch.randn(4, 4)], "z": torch.randn(4, 2)}, 2)),
}


class Subject:
    """A wrapped model and its eager twin."""

    def __init__(self, draw: random.Random, kind: str) -> None:
        torch.manual_seed(draw.randrange(1 << 30))
        self.kind = KINDS[kind]
        self.model = self.kind.make()
        self.eager = copy.deepcopy(self.model)
        opts = options().randomSeed(draw.randrange(1 << 30))
        if self.kind.trained:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            self.wrapper = poptorch.trainingModel(self.model, opts, optimizer)
        else:
            self.wrapper = poptorch.inferenceModel(self.model, opts)

    def native(self, args: Args, kwargs: dict[str, Any]) -> Any:
        """Do with the twin what a call does, and return what it returns."""
        if not self.kind.trained:
            with torch.no_grad():
                return self.eager(*args, **kwargs)
        self.eager.zero_grad()
        loss = self.eager(*args, **kwargs)
        loss.backward()
        torch.optim.SGD(self.eager.parameters(), lr=LR).step()
        return loss.detach()

    def large(self) -> bool:
        """Tell whether odd batches have made weights large."""
        return any(bool((t.abs() > LARGE).any()) for t in self.model.parameters())

    def follow(self) -> None:
        """Give the twin the weights of the model."""
        self.eager.load_state_dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """Return all that a failing call must not change."""
        random_state = self.wrapper.rng_state if self.wrapper.isCompiled() else None
        weights = {name: t.clone() for name, t in self.model.state_dict().items()}
        return {**weights, "random": random_state, "compiled": self.wrapper.isCompiled()}


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value.nan_to_num(9e9), second[key].nan_to_num(9e9))
        if isinstance(value, torch.Tensor) else value == second[key] for key, value in first.items()
    )  # fmt: skip


def close(got: Any, expected: Any) -> bool:
    """Tell whether results are equal but for rounding."""
    how = {"equal_nan": True, "check_dtype": False, "check_stride": False}
    try:
        torch.testing.assert_close(got, expected, **near(80, 2), **how)
    except AssertionError:
        return False
    return True
