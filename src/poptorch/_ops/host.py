"""Calling a Python function of the host from inside a program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .effects import define_effect
from .library import copied

_numbers: dict[str, itertools.count[int]] = {}
_sites: dict[str, Site] = {}


@dataclass(frozen=True, eq=False)
class Site:
    """One place of a program that calls the host."""

    function: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


def register(name: str, site: Site) -> str:
    """Keep a call site for as long as the process lives; return what programs call it."""
    handle = f"{name}#{next(_numbers.setdefault(name, itertools.count()))}"
    _sites[handle] = site
    return handle


def _call(inputs: list[torch.Tensor], handle: str, after: list[torch.Tensor]) -> list[torch.Tensor]:
    results = _sites[handle].function([tensor.detach().cpu().clone() for tensor in inputs])
    device = inputs[0].device if inputs else torch.device("cpu")
    return [copied(result.detach().to(device)) for result in results]


def _fake(
    inputs: Sequence[torch.Tensor], handle: str, after: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    device = inputs[0].device if inputs else torch.device("cpu")
    outputs = _sites[handle].outputs
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]


host_call = define_effect(
    "host_call",
    "(Tensor[] inputs, str handle, Tensor[] after) -> Tensor[]",
    _call,
    _fake,
)
