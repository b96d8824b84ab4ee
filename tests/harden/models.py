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
from helpers.wrapping import Calling, Graded, options

Args = tuple[Any, ...]
LR = 0.05
LARGE = 10.0  # of a weight: from there on rounding decides what a step of training gives


def statistics(dropout: float = 0.0) -> Graded:
    layers = {"norm": nn.BatchNorm1d(4), "layer": nn.Linear(4, 3), "dropout": nn.Dropout(dropout)}
    return Graded(**layers)


def words() -> Graded:
    layers = {"words": nn.Embedding(7, 4), "flat": nn.Flatten(), "layer": nn.Linear(20, 3)}
    return Graded(nn.functional.cross_entropy, **layers)


def gray() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))


def variadic() -> nn.Module:
    return Calling(lambda *xs, **kw: sum(xs) + sum(kw.values()))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, parts: Any, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": self.layer(parts["x"][0]) * scale, "z": parts["z"] + 1}


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    trained: bool
    batch: Callable[[], Args]


KINDS = {
    "linear": Kind(lambda: nn.Linear(4, 3), False, lambda: (torch.randn(4, 4),)),
    "statistics": Kind(statistics, True, lambda: (torch.randn(4, 4), torch.randn(4, 3))),
    "words": Kind(words, True, lambda: (torch.randint(7, (4, 5)), torch.randint(3, (4,)))),
    "gray": Kind(gray, False, lambda: (torch.randn(4, 1, 6, 6),)),
    "variadic": Kind(variadic, False, lambda: (torch.randn(4, 3), torch.randn(4, 3))),
    "nested": Kind(Nested, False, lambda: ({"x": [torch.randn(4, 4)], "z": torch.randn(4, 2)}, 2)),
}


class Subject:
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
        if not self.kind.trained:
            with torch.no_grad():
                return self.eager(*args, **kwargs)
        self.eager.zero_grad()
        loss = self.eager(*args, **kwargs)
        loss.backward()
        torch.optim.SGD(self.eager.parameters(), lr=LR).step()
        return loss.detach()

    def large(self) -> bool:
        return any(bool((t.abs() > LARGE).any()) for t in self.model.parameters())

    def follow(self) -> None:
        self.eager.load_state_dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """Return all that a failing call must not change."""
        random_state = self.wrapper.rng_state if self.wrapper.isCompiled() else None
        weights = {name: t.clone() for name, t in self.model.state_dict().items()}
        return {**weights, "random": random_state, "compiled": self.wrapper.isCompiled()}


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value.nan_to_num(9e9), second[key].nan_to_num(9e9))
        if isinstance(value, torch.Tensor)
        else value == second[key]
        for key, value in first.items()
    )


def close(got: Any, expected: Any) -> bool:
    how = {"equal_nan": True, "check_dtype": False, "check_stride": False}
    try:
        torch.testing.assert_close(got, expected, **near(80, 2), **how)
    except AssertionError:
        return False
    return True
