"""Which of a model's modules train and which evaluate: ``train()`` and ``eval()``."""

from __future__ import annotations

import operator

from torch import nn

_training = operator.attrgetter("training")
Mode = tuple[bool, ...]


class Modes:
    """Looks at the modes of a model.

    Args:
        module: what is traced: a shallow copy of the user's module, with the same sub-modules.
        users: the user's module.
    """

    def __init__(self, module: nn.Module, users: nn.Module) -> None:
        self._module = module
        self._users = users
        self._seen = users.training
        self._all = list(module.modules())

    def now(self) -> Mode:
        """Return the mode of each module."""
        training = self._users.training
        if training != self._seen:  # what is called on the user's module is meant for the copy, too
            self._seen = training
            self._module.training = training
        return tuple(map(_training, self._all))

    def look_again(self) -> None:
        """Notice modules that have come and gone, and what was called on the user's."""
        self._all = list(self._module.modules())
        self.now()
