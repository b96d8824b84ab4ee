"""Combine several torch optimizers that one program steps, as for a GAN or an actor-critic
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base.errors import Error, InvalidType
from .kind import CLIPPING
from .optimizer import Optimizer

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Joint:
    """Several optimizers that can be read as one with all their groups. Each keeps its own
    state.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.members for group in each.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.members[0], name)

    def __reduce__(self) -> Any:
        return Joint, (self.members,)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    kind: type = type(optimizer)
    return optimizer.members if kind is Joint else (optimizer,)  # type: ignore[attr-defined]


def class_of(optimizer: Any) -> type:
    """Return the class of an optimizer, or of each one that was combined."""
    return members_of(optimizer)[0].__class__


def joined(given: Any, before: torch.optim.Optimizer | None = None) -> Any:
    """Return one optimizer for those that a user passed. Return ``before`` if it contains the same
    ones.
    """
    if not isinstance(given, (list, tuple)):
        return given
    if before is not None and [*map(id, members_of(before))] == [*map(id, given)]:
        return before
    _check(given)
    return given[0] if len(given) == 1 else Joint(given)


def _check(given: Sequence[torch.optim.Optimizer]) -> None:
    kinds = dict.fromkeys(type(each) for each in given)
    if len(kinds) != 1 or not issubclass(next(iter(kinds)), torch.optim.Optimizer):
        raise InvalidType(
            "Several optimizers of a model must be of the same class",
            got=", ".join(kind.__qualname__ for kind in kinds) or "none",
            fix=(
                "use the same class for all; the optimizers may differ only in numeric "
                "hyper-parameters of their parameter groups"
            ),
        )
    if len(given) > 1 and any(isinstance(each, Optimizer) for each in given):
        raise InvalidType(
            "Several optimizers of a model must be optimizers of torch.optim",
            got=", ".join(kind.__qualname__ for kind in kinds) + " of poptorch.optim",
            fix=("use optimizers of torch.optim, or one optimizer with several parameter groups"),
        )
    limited = [name for each in given for name in (*CLIPPING, "loss_scaling") if name in vars(each)]
    if len(given) > 1 and limited:
        raise Error(
            "Several optimizers of a model cannot clip gradients or scale the loss",
            got=f"an optimizer with the attribute {limited[0]}",
            fix=(
                "use one optimizer with several parameter groups, which clips by the norm "
                "over all of them"
            ),
        )
    parameters = [id(p) for each in given for group in each.param_groups for p in group["params"]]
    if len({*parameters}) != len(parameters):
        raise Error(
            "A parameter is in several optimizers of a model",
            got=f"{len(parameters) - len({*parameters})} parameters are passed more than once",
            fix="pass each parameter to only one of the optimizers",
        )
