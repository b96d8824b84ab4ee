"""The physical devices that chips of a plan stand for.

With CUDA devices every chip has one, in turn, and a stream of its own, so that chips work side by
side while the host only hands out actions. Without, all chips are the host's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Place:
    """Where a chip's tensors are and its operators run.

    Attributes:
        device: of the tensors.
        stream: the order in which operators run; None where they run at once.
    """

    device: torch.device
    stream: Any = None

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """What is done in the block is done here."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor here."""
        return value.to(self.device, non_blocking=True, copy=True)


def places(chips: int) -> list[Place]:
    """Return a place for every chip."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        return [Place(torch.device("cpu"))] * chips
    found = [torch.device("cuda", chip % devices) for chip in range(chips)]
    stream: Any = torch.cuda.Stream  # it has no types
    return [Place(device, stream(device)) for device in found]


def meet(everywhere: Sequence[Place]) -> None:
    """Let what comes next anywhere wait for what was begun everywhere."""
    streams = [place.stream for place in everywhere if place.stream is not None]
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


def at_home(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a graph, which was traced for the host, for another device."""
    if device.type == "cpu":
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
    moved = fx.GraphModule(module, graph)
    for name, part in list(moved.named_children()):
        if isinstance(part, fx.GraphModule):  # the body of a loop or branch
            setattr(moved, name, at_home(part, device))
    return moved
