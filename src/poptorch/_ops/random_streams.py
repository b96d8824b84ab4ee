"""Draw from random streams: a replica's numbers at a step do not depend on what runs
concurrently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .library import define

aten = torch.ops.aten

_lanes: list[torch.Generator] = []  # used by one program at a time, like torch's generator


def next_key(state: torch.Tensor) -> tuple[int, torch.Tensor]:
    generator = torch.Generator("cpu").set_state(state)
    key = torch.randint(1 << 62, (), generator=generator, device="cpu")
    return int(key), generator.get_state()


def seed(key: int, step: int, replica: int, part: str = "") -> int:
    text = f"{key} {step} {replica} {part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def begin(seeds: Sequence[int]) -> None:
    alone = len(seeds) == 1
    generators = [torch.default_generator] if alone else _generators(len(seeds))
    for generator, value in zip(generators, seeds, strict=True):
        generator.manual_seed(value)


def _generators(count: int) -> list[torch.Generator]:
    while len(_lanes) < count:
        _lanes.append(torch.Generator())
    return _lanes[:count]


SHARES = "shares"  # the kind that draws ones, with the probability of each in a tensor

_Fill = Callable[[torch.Tensor, torch.Tensor, float, float, torch.Generator], object]
_FILLS: dict[str, _Fill] = {
    SHARES: lambda row, like, a, b, g: row.bernoulli_(like, generator=g),
    "bernoulli": lambda row, like, a, b, g: row.bernoulli_(a, generator=g),
    "uniform": lambda row, like, a, b, g: row.uniform_(a, b, generator=g),
    "normal": lambda row, like, a, b, g: row.normal_(a, b, generator=g),
    "integers": lambda row, like, a, b, g: row.random_(int(a), int(b), generator=g),
    "exponential": lambda row, like, a, b, g: row.exponential_(a, generator=g),
}


def _draw(
    like: torch.Tensor, kind: str, a: float, b: float, lanes: int, number: int
) -> torch.Tensor:
    result = torch.empty_like(like)
    fill, generators = _FILLS[kind], _generators(lanes)
    for row, source, generator in zip(result.unbind(), like.unbind(), generators, strict=True):
        fill(row, source, a, b, generator)
    return result


draw = define(
    "draw",
    "(Tensor like, str kind, float a, float b, int lanes, int number) -> Tensor",
    _draw,
    lambda like, *_: torch.empty_like(like),
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""Draws lane by lane. ``number`` distinguishes two draws in a graph."""


def lane_by_lane(target: Any, args: Sequence[Any]) -> tuple[str, float, float] | None:
    rule = _RULES.get(target)
    if rule is None:
        return None
    kind, a, b = rule(*args)
    exact = kind != "integers" or max(abs(a), abs(b)) <= 1 << 53  # as floats
    return (kind, float(a), float(b)) if exact else None


_RULES: dict[Any, Callable[..., tuple[str, float, float]]] = {
    aten.bernoulli.default: lambda x: (SHARES, 0, 0),
    aten.bernoulli.p: lambda x, p=0.5: ("bernoulli", p, 0),
    aten.rand.default: lambda size: ("uniform", 0, 1),
    aten.rand_like.default: lambda x: ("uniform", 0, 1),
    aten.rand.generator: lambda size: ("uniform", 0, 1),
    aten.uniform.default: lambda x, a=0.0, b=1.0: ("uniform", a, b),
    aten.randn.default: lambda size: ("normal", 0, 1),
    aten.randn.generator: lambda size: ("normal", 0, 1),
    aten.randn_like.default: lambda x: ("normal", 0, 1),
    aten.normal_functional.default: lambda x, mean=0.0, std=1.0: ("normal", mean, std),
    aten.randint.default: lambda high, size: ("integers", 0, high),
    aten.randint.generator: lambda high, size: ("integers", 0, high),
    aten.randint.low_generator: lambda low, high, size: ("integers", low, high),
    aten.randint.low: lambda low, high, size: ("integers", low, high),
    aten.randint_like.default: lambda x, high: ("integers", 0, high),
    aten.randint_like.low_dtype: lambda x, low, high: ("integers", low, high),
    aten.exponential.default: lambda x, rate=1.0: ("exponential", rate, 0),
}
