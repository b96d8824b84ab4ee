"""What a capture hears from the operators that ``forward`` calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from .._ops.context import Capture, listening
from . import marks, trace
from .recorded import recorded, surroundings_waiting
from .value_reads import ValueReads


@dataclass(eq=False)
class CaptureContext(Capture):
    stochastic: bool = False  # the program rounds to float16 at random
    reads: ValueReads = field(default_factory=ValueReads)

    def identify(self, tensor: torch.Tensor) -> int | None:
        place = recorded(trace.outermost(tensor))
        return None if place is None else list(place[0].graph.nodes).index(place[0])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self.lanes:
            raise NotImplementedError("host code runs one micro-batch at a time")
        with trace.untraced(), listening(None):
            yield

    def body(
        self, function: Callable[..., list[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        if self.lanes:
            raise NotImplementedError("loops and branches run one micro-batch at a time")
        outer, self.groups = self.groups, {}

        def lower(graph: fx.Graph) -> None:
            marks.lower(graph, (), (), self.groups)

        try:
            with surroundings_waiting():
                return trace.trace_part(
                    lambda flat: function(*flat), inputs, lower, self.stochastic
                )
        finally:
            self.groups = outer
