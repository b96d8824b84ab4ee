"""Attributes that appear on an optimizer after it was first set: ignored, with one warning each.

Source: PopTorch user guide, "Optimizers".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from .._base import log
from .adam import Adam, AdamW
from .lamb import LAMB
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD

_CLASSES: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, LAMB)
# ``step`` is there once a scheduler has wrapped it.
_OBJECT = {"defaults", "state", "param_groups", "variable_attrs", "step"} | {
    *("ipu_state_is_dirty", "host_state_is_dirty"),
    *(name for cls in _CLASSES for name in (*cls._child_vars, *cls._child_only)),
}
_GROUP = {
    "params",
    "param_names",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
} | {
    "decoupled_weight_decay",
    *(name for cls in _CLASSES for name in cls._group_vars),
}


class AttributeWatch:
    """Remembers the attributes that an optimizer had when it was first set.

    Args:
        optimizer: the one that is set first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen = {(kind, name) for kind, _, name in _attributes(optimizer)}

    def check(self, optimizer: torch.optim.Optimizer, relaxed: bool = False) -> None:
        """Warn once of each attribute that was not there.

        Args:
            optimizer: the one that is set now.
            relaxed: log at debug level (``relaxOptimizerAttributesChecks``).
        """
        level = logging.DEBUG if relaxed else logging.WARNING
        for kind, label, name in _attributes(optimizer):
            if (kind, name) not in self._seen:
                self._seen.add((kind, name))
                log.python.log(
                    level,
                    "Ignoring unexpected %s in %s optimizer: %s",
                    label,
                    type(optimizer).__name__,
                    name,
                )


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, its label, name) of attributes that are not known anyway."""
    for name in optimizer.__dict__:
        if name not in _OBJECT and not name.startswith("_"):
            yield "object", "optimizer attribute", name
    for name in optimizer.defaults:
        if name not in _GROUP:
            yield "default", "default group variable", name
    for index, group in enumerate(optimizer.param_groups):
        for name in group:
            if name not in _GROUP:
                yield f"group {index}", f"group {index} attribute", name
