"""What a capture hears from the operators that ``forward`` calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._base.errors import Error
from .._ops import scopes
from .._ops.context import Replicas, listening
from . import hints, trace
from .losses import LossFinder
from .recorders import recorded
from .value_reads import ValueReads


@dataclass(eq=False)
class CaptureContext:
    """The capture in progress; implements ``_ops.context.Listener``."""

    training: bool
    lanes: bool = False
    stochastic: bool = False
    losses: LossFinder = field(default_factory=LossFinder)
    reads: ValueReads = field(default_factory=ValueReads)
    groups: dict[int, hints.Group] = field(default_factory=dict)
    replicas: Replicas = field(default_factory=Replicas)
    exchanging: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _group_is_open: bool = False

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        """A value that training may start its gradients from."""
        self.losses.mark_loss(loss, name)

    def number(self) -> int:
        """Count the operators that need a name."""
        return next(self._numbers)

    def together(self) -> Replicas:
        """Note that replicas exchange something; return them."""
        self.exchanging = True
        return self.replicas

    def identify(self, tensor: torch.Tensor) -> int | None:
        """Return the place of a tensor among all that were recorded."""
        place = recorded(trace.outermost(tensor))
        return None if place is None else list(place[0].graph.nodes).index(place[0])

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
        self.groups[number] = hints.Group(options, where)
        self._group_is_open = True
        try:
            with scopes.grouped(number):
                yield
        finally:
            self._group_is_open = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block code runs for real, as if no model were being captured."""
        if self.lanes:
            raise NotImplementedError("host code runs one micro-batch at a time")
        with trace.untraced(), listening(None):
            yield

    def body(
        self, function: Callable[..., list[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """Capture a part that runs any number of times."""
        if self.lanes:
            raise NotImplementedError("loops and branches run one micro-batch at a time")
        outer, self.groups = self.groups, {}
        try:
            return trace.trace_part(
                lambda flat: function(*flat), inputs, self._lower_hints, self.stochastic
            )
        finally:
            self.groups = outer

    def _lower_hints(self, graph: fx.Graph) -> None:
        hints.lower_hints(graph, (), (), self.groups)
