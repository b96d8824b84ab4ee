"""The active block while ``forward`` is captured, and the labels that nodes get from it.

The tracer copies ``custom`` of torch's current meta to every node it creates, and keeps it when a
graph is replayed; that is all that is used of it here.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

import torch
import torch.fx.traceback as fx_traceback
from torch import fx

from .._base import source
from .._ir.blocks import OUTSIDE, Label, Visit, label_of, relabel, with_label

_recorder: ContextVar[Recorder | None] = ContextVar("poptorch_blocks", default=None)


class Recorder:
    """Notes which blocks ``forward`` enters and labels nodes accordingly."""

    def __init__(self) -> None:
        self.visits: list[Visit] = [Visit()]
        self._label = Label(visit=0)
        _write(self._label)

    def start(self, block: str, ipu: int | None) -> None:
        """Make a block the active one."""
        self.visits.append(Visit(block, ipu, source.calling_line()))
        self._set(Label(visit=len(self.visits) - 1))

    def end(self) -> None:
        """Leave the active block: what runs now belongs to none."""
        self._set(Label(visit=OUTSIDE))

    def finish_forward(self) -> None:
        """The user's part is over: nodes made from here on go where their neighbours are."""
        self._set(Label())

    def begin_backward(self) -> None:
        """Nodes made from here on belong to the backward pass."""
        self._set(Label(backward=True))

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Within the block, nodes are marked to be kept rather than computed again."""
        _write(replace(self._label, checkpoint=True))
        try:
            yield
        finally:
            _write(self._label)

    def _set(self, label: Label) -> None:
        self._label = label
        _write(label)


def recorder() -> Recorder | None:
    """The recorder of the capture in progress, or None outside one."""
    return _recorder.get()


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record blocks and label nodes; whatever happens, nothing is active afterwards."""
    meta = fx_traceback.get_current_meta()
    before = meta.get("custom")
    mine = Recorder()
    token = _recorder.set(mine)
    try:
        yield mine
    finally:
        _recorder.reset(token)
        if before is None:
            meta.pop("custom", None)
        else:
            meta["custom"] = before


def _write(label: Label) -> None:
    meta = fx_traceback.get_current_meta()
    meta["custom"] = with_label(meta.get("custom"), label)


def copy_to_backward(graph: fx.Graph) -> None:
    """Give nodes of the backward pass the visit of the forward node that they differentiate.

    Both carry the sequence number of the same autograd function. An operator that makes several
    of those is labelled by the last. Additions of gradients have no number: theirs stays open.
    """
    forward: dict[int, int | None] = {}
    for node in graph.nodes:  # later nodes with the same number made no function of their own
        if "seq_nr" in node.meta and not label_of(node).backward:
            forward.setdefault(node.meta["seq_nr"], label_of(node).visit)
    numbers = sorted(forward)
    for node in graph.nodes:
        label = label_of(node)
        if not label.backward or not _differentiates(node):
            continue
        at = bisect.bisect_left(numbers, node.meta["seq_nr"])
        if at < len(numbers):
            relabel(node, replace(label, visit=forward[numbers[at]]))


def _differentiates(node: fx.Node) -> bool:
    meta = node.meta
    return bool(meta.get("autograd_backward")) and not meta.get("is_gradient_acc")


def checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; while capturing, its value is marked to be kept for the backward pass."""
    active = _recorder.get()
    if active is None:
        return tensor
    with active.checkpointing():
        return torch.ops.aten.alias(tensor)  # type: ignore[no-any-return]
