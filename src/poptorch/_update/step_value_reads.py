"""Decide what happens if a step reads a value in Python.

A value that depends only on hyper-parameters becomes a constant of the program. Any other value is
known only while the program runs, and the step is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from .._base.errors import Error
from .value_origins import HYPER, Origins


class Restart(Exception):  # noqa: N818 (it says what to do)
    """Something was found out that should be known when a run starts."""


class ValueNeeded(Restart):
    """Hyper-parameters whose values decide what the step does, so that they become constants."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(keys)))
        self.keys = keys


def value_needed(what: str, line: str | None) -> Error:
    return Error(
        "The optimizer's step reads the value of a tensor in Python",
        got=what,
        where=line,
        fix=(
            "compute with tensors: torch.where, x ** 0.5 for math.sqrt(x), torch.clamp",
            "or use another optimizer: one of poptorch.optim, or any of torch.optim except LBFGS",
        ),
    )


def foreign_tensor(tensor: Tensor, is_gradient: bool) -> Error:
    what = "the gradient of a tensor" if is_gradient else "a tensor"
    return Error(
        "The optimizer's step uses a tensor that is not part of the step",
        got=(
            f"{what} of shape {tuple(tensor.shape)} that is neither a parameter of the optimizer "
            "nor in its state"
        ),
        fix=(
            "store the tensor in the state of a parameter: optimizer.state[parameter]['name']",
            "or create the optimizer from all parameters that the step uses",
        ),
    )


def refuse_read(origins: Origins, value: Any, what: str) -> NoReturn:
    """Raise the error for a read of a value.

    Raises:
        ValueNeeded: the value depends only on hyper-parameters.
        Error: the value depends on something else.
    """
    sources = origins.sources(value)
    if sources and all(role == HYPER for role, _ in sources):
        raise ValueNeeded(frozenset(key for _, key in sources))
    on = sorted(key for role, key in sources if role != HYPER)
    of = ", ".join(on[:3]) or "a tensor"
    raise value_needed(f"{what}, of what {of} is at each update", None)
