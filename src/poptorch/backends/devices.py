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

from .._ir.graph import graph_module


@dataclass(frozen=True)
class Device:
    """Where a chip's tensors are and its operators run.

    Attributes:
        torch_device: of the tensors.
        stream: the order in which operators run; None where they run at once.
    """

    torch_device: torch.device
    stream: Any = None

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """What is done in the block is done here."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor here."""
        return value.to(self.torch_device, non_blocking=True, copy=True)


def devices(chips: int) -> list[Device]:
    """Return a device for every chip."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Device(torch.device("cpu"))] * chips
    physical = [torch.device("cuda", chip % count) for chip in range(chips)]
    stream: Any = torch.cuda.Stream  # it has no types
    return [Device(each, stream(each)) for each in physical]


def synchronise(devices: Sequence[Device]) -> None:
    """Let what comes next on any device wait for what was begun on all of them."""
    streams = [device.stream for device in devices if device.stream is not None]
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
    moved = graph_module(module, graph)
    for name, part in list(moved.named_children()):
        if isinstance(part, fx.GraphModule):  # the body of a loop or branch
            setattr(moved, name, at_home(part, device))
    return moved
