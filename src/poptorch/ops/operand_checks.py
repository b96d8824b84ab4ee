"""Check arguments in ways that several operators need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from .._base.errors import Error
from .._ir.slots import narrowed

TensorKind = tuple[tuple[int, ...], torch.dtype]


def refuse(title: str, got: str, fix: str) -> NoReturn:
    raise Error(title, got=got, fix=fix)


def that(fits: bool, title: str, got: str, fix: str) -> None:
    if not fits:
        refuse(title, got, fix)


def tensor(value: Any, title: str, fix: str = "pass a torch.Tensor") -> None:
    if not isinstance(value, torch.Tensor):  # the text of a tensor may be long
        refuse(title, f"{type(value).__name__} {value!r}", fix)


def tensors(returned: Any, title: str) -> list[torch.Tensor]:
    values = [returned] if isinstance(returned, torch.Tensor) else returned
    if isinstance(values, list | tuple) and all(isinstance(v, torch.Tensor) for v in values):
        return list(values)
    refuse(title, repr(returned), "return a tensor, or a tuple or list of tensors")


def kinds_of(tensors: Iterable[torch.Tensor]) -> tuple[TensorKind, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def describe(kinds: Sequence[TensorKind]) -> str:
    return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in kinds) or "nothing"


def empty(kinds: Iterable[TensorKind], operands: Iterable[Any]) -> list[torch.Tensor]:
    """Return empty tensors of the given kinds, on the device of the first of the other tensors."""
    device = next((x.device for x in operands if isinstance(x, torch.Tensor)), torch.device("cpu"))
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]


def like_examples(
    name: str, results: Sequence[torch.Tensor], examples: Sequence[TensorKind]
) -> None:
    """Compare results with the expected kinds. A 64-bit type matches the 32-bit type that
    it becomes.
    """
    got = kinds_of(results)
    if [(s, narrowed(d)) for s, d in got] != [(s, narrowed(d)) for s, d in examples]:
        refuse(
            f"The results of custom operator {name} do not match its example outputs",
            f"{describe(got)} instead of {describe(examples)}",
            "pass example_outputs with the shapes and dtypes of the results",
        )
