"""What a capture hears from the operators that ``forward`` calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._base.errors import Error
from .._ops import scopes
from . import marks
from .losses import LossFinder


@dataclass(eq=False)
class Capturing:
    """The capture in progress; implements ``_ops.context.Listener``.

    Attributes:
        training: whether the captured program computes gradients.
        losses: finds the loss.
        groups: the groups of convolutions, by number.
    """

    training: bool
    losses: LossFinder = field(default_factory=LossFinder)
    groups: dict[int, marks.Group] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _group_is_open: bool = False

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        """A value that training may start its gradients from."""
        self.losses.mark_loss(loss, name)

    def number(self) -> int:
        """Count the operators that need a name."""
        return next(self._numbers)

    @contextlib.contextmanager
    def group(self, options: Mapping[str, tuple[Any, ...]], where: str | None) -> Iterator[None]:
        """Within the block convolutions belong to one group."""
        if self._group_is_open:
            raise Error(
                "Nested poptorch.MultiConv is not supported",
                where=where,
                fix="end the outer group first",
            )
        number = len(self.groups)
        self.groups[number] = marks.Group(options, where)
        self._group_is_open = True
        try:
            with scopes.grouped(number):
                yield
        finally:
            self._group_is_open = False
