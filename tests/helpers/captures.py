"""Capturing one micro-batch of a module as a session does, for tests of what is captured."""

from __future__ import annotations

import torch
from torch import nn

from poptorch import _capture
from poptorch._capture import Micro, Request
from poptorch._ir.blocks import label_of
from poptorch._ir.slot import Kind, Slot


def request(module: nn.Module, *inputs: torch.Tensor, training: bool = False) -> Request:
    """Return what a session would ask to be captured."""
    tensors = _capture.tensors_of(module)
    state = tuple(
        Slot.like(Kind.PARAM if tied.is_parameter else Kind.BUFFER, path, tied.tensor)
        for path, tied in tensors.items()
    )
    batch = tuple(Slot.like(Kind.BATCH, str(i), tensor) for i, tensor in enumerate(inputs))
    trained = frozenset(slot.path for slot in state if slot.kind is Kind.PARAM)
    return Request(
        module,
        lambda tensors: module(*tensors),
        tensors,
        state,
        batch,
        trained if training else frozenset(),
        training,
    )


def capture(module: nn.Module, *inputs: torch.Tensor, training: bool = False) -> Micro:
    """Capture a module."""
    return _capture.capture(request(module, *inputs, training=training))


def labels(micro: Micro) -> list[tuple[str, str | None, bool]]:
    """Return (operator, id of its block, backward) of every node."""
    found = []
    for node in micro.graph.module.graph.nodes:
        if node.op == "call_function":
            label = label_of(node)
            known = label.visit is not None and label.visit >= 0
            block = micro.visits[label.visit].block if known else None
            found.append((node.target.__name__.split(".")[0], block, label.backward))
    return found
