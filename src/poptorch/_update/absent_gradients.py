"""Represent parameters of an optimizer without a gradient in the program, such as frozen ones.

A step that leaves them alone works. Their values are not inputs of the update, so a step that reads
or changes them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .._base.errors import Error
from .value_origins import Identifier, Origins

ABSENT = "absent"  # role of sources


class Absent(NamedTuple):
    """A tensor without values, and its identifier before the step."""

    name: str
    tensor: Tensor
    before: Identifier


def enter(origins: Origins, tensor: Tensor, path: str) -> Absent:
    """Make a tensor without values an input of the step, to find out whether the step uses it."""
    name = f"'{path}'" if path else f"a frozen parameter of shape {tuple(tensor.shape)}"
    origins.enter(tensor, f"{ABSENT} {name}", (ABSENT, name))
    return Absent(name, tensor, origins.identifier(tensor))


def check_unchanged(origins: Origins, absent: Sequence[Absent]) -> None:
    for each in absent:
        if origins.identifier(each.tensor) != each.before:
            raise _refused(f"{each.name} is changed")


def check_unread(origins: Origins, results: Mapping[str, Tensor]) -> None:
    for value in results.values():
        for role, name in sorted(origins.sources(value)):
            if role == ABSENT:
                raise _refused(f"an updated value depends on {name}")


def _refused(got: str) -> Error:
    return Error(
        "The optimizer's step uses a parameter that has no gradient",
        got=got,
        fix=(
            "pass only parameters to the optimizer that the model trains",
            "or skip parameters in step: if parameter.grad is None: continue",
        ),
    )
