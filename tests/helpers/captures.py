"""Capturing one micro-batch of a module as a session does, for tests of what is captured."""

import torch

from poptorch import _capture
from poptorch._capture import Micro, Request
from poptorch._ir import slots
from poptorch._ir.blocks import label_of
from poptorch._ir.slots import Kind


def capture(module: torch.nn.Module, *inputs: torch.Tensor, training=False, replicas=1) -> Micro:
    tensors = _capture.tensors_of(module)
    state = tuple(
        (slots.param if tied.is_parameter else slots.buffer)(
            path, tied.tensor.shape, tied.tensor.dtype
        )
        for path, tied in tensors.items()
    )
    batch = tuple(slots.batch_input(i, tuple(x.shape), x.dtype) for i, x in enumerate(inputs))
    trained = frozenset(slot.path for slot in state if slot.kind is Kind.PARAM and training)

    given = (lambda tensors: module(*tensors)), tensors, state, batch, trained, training
    return _capture.capture(Request(module, *given, replicas=replicas))


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
