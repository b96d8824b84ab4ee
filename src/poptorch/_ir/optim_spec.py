"""OptimSpec: an optimizer's structure, frozen; and its hyper-parameter values, which may change.

The structure (algorithm, groups, constness, dtypes, clipping) is compiled in. The values of
variable hyper-parameters are inputs of the update graph, so changing them never recompiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Setting = bool | int | float | str | None


@dataclass(frozen=True)
class OptimGroup:
    """One parameter group.

    Attributes:
        params: paths of the parameters, as the program names them.
        settings: structural settings and constant hyper-parameters, sorted ``(name, value)``.
        variables: names of the hyper-parameters that are inputs (``slots.hyper``).
    """

    params: tuple[str, ...]
    settings: tuple[tuple[str, Setting], ...]
    variables: tuple[str, ...]

    def setting(self, name: str) -> Setting:
        """Value of a constant setting."""
        return dict(self.settings)[name]


@dataclass(frozen=True)
class OptimSpec:
    """An optimizer's compiled-in structure.

    Attributes:
        algorithm: ``sgd``, ``adam``, ``adamw``, ``rmsprop`` or ``lamb``.
        groups: the parameter groups.
        settings: settings of the whole optimizer (accumulator dtypes as strings such as
            ``"float16"``, ``max_grad_norm``, ...), sorted ``(name, value)``.
        variables: whole-optimizer hyper-parameters that are inputs, for instance
            ``loss_scaling``.
    """

    algorithm: str
    groups: tuple[OptimGroup, ...]
    settings: tuple[tuple[str, Setting], ...] = ()
    variables: tuple[str, ...] = ()

    def setting(self, name: str) -> Setting:
        """Value of a setting of the whole optimizer."""
        return dict(self.settings)[name]

    @property
    def max_grad_norm(self) -> float:
        """The norm of all gradients to which they are clipped; infinity if they are not."""
        limit = dict(self.settings).get("max_grad_norm", math.inf)
        assert isinstance(limit, float)
        return limit

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped by the norm of all."""
        return self.max_grad_norm != math.inf
