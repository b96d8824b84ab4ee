"""Track the active block while ``forward`` is captured, and label nodes with it."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._base import private, source
from .._base.thread_safety import holding, only_in_this_thread
from .._ir.block_labels import META, OUTSIDE, Label, Visit, label_of, marks, note_line, relabel
from .._ir.operators import functions_before, reachable

ModuleListener = Callable[[nn.Module, Any, str], None]
_DEPTH = "poptorch_backward"  # the note of how many autograd functions are being called

_recorder: ContextVar[Recorder | None] = ContextVar("poptorch_blocks", default=None)


class Recorder:
    def __init__(self) -> None:
        self.visits: list[Visit] = []
        # numbers of the BeginBlocks, in the order of their first calls
        self.annotations: list[int] = []
        self.heard: ModuleListener | None = None  # called with what modules return
        self.set(Label())

    def start(self, block: str, ipu: int | None) -> None:
        self.visits.append(Visit(block, ipu, source.calling_line()))
        self.set(replace(self.label, visit=len(self.visits) - 1))

    def end(self) -> None:
        self.set(replace(self.label, visit=OUTSIDE))

    def set(self, label: Label) -> None:
        self.label = label
        note(**{META: label})


def recorder() -> Recorder | None:
    return _recorder.get()


@contextlib.contextmanager
def in_forward(heard: ModuleListener) -> Iterator[None]:
    mine = _recorder.get()
    if mine is None:
        yield
        return
    mine.visits, mine.heard = [Visit()], heard
    mine.annotations.clear()
    mine.set(Label(visit=0))
    try:
        yield
    finally:
        mine.set(Label())
        mine.heard = None


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    mine = _recorder.get()
    if mine is None:
        yield
        return
    outer = mine.label.scope
    mine.set(replace(mine.label, scope=f"{outer}/{name}".lstrip("/")))
    try:
        yield
    finally:
        mine.set(replace(mine.label, scope=outer))


def note(**values: Any) -> None:
    _set_notes({**_notes(), **values})


@contextlib.contextmanager
def noted(**values: Any) -> Iterator[None]:
    """Add notes within the block. Notes with other keys that are made meanwhile stay."""
    note(**values)
    try:
        yield
    finally:
        _set_notes({key: value for key, value in _notes().items() if key not in values})


def _notes() -> dict[str, Any]:
    # Looked up each time, because a nested trace replaces the dict.
    notes: dict[str, Any] = fx_traceback.get_current_meta().get("custom", {})
    return notes


def _set_notes(notes: dict[str, Any]) -> None:
    meta = fx_traceback.get_current_meta()
    if notes:
        meta["custom"] = notes
    else:
        meta.pop("custom", None)


@contextlib.contextmanager
def recording(root: nn.Module) -> Iterator[Recorder]:
    before, mine = _notes(), Recorder()
    paths = {part: name for name, part in root.named_modules()}
    outer: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        outer.append(mine.label.module)
        mine.set(replace(mine.label, module=paths.get(module, mine.label.module)))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        mine.set(replace(mine.label, module=outer.pop()))
        if mine.heard is not None:
            mine.heard(module, output, mine.label.scope)

    # Hooks for all modules, so that no module changes.
    entered = register_module_forward_pre_hook(only_in_this_thread(enter))
    left = register_module_forward_hook(only_in_this_thread(leave), always_call=True)
    try:
        with holding(_recorder, mine), entered, left:
            yield mine
    finally:
        _set_notes(before)


def follow_backward(loss: torch.Tensor) -> None:
    if loss.grad_fn is None:
        return
    hook = private.optional("setup_stacktrace_preservation_hooks")
    if hook is None:
        return
    hook([loss.grad_fn])

    def enter(functions: int) -> None:
        note(**{_DEPTH: _notes().get(_DEPTH, 0) + functions})

    for function in reachable([loss.grad_fn], functions_before):
        function.register_prehook(lambda _: enter(1))
        function.register_hook(lambda _inputs, _outputs: enter(-1))


def copy_to_backward(graph: fx.Graph) -> None:
    for node, origin in origins(graph).items():
        relabel(node, replace(label_of(origin), backward=True))
        note_line(node, source.innermost_user_line(origin.meta.get("stack_trace")))


def origins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node of the backward pass the forward node that it differentiates."""
    forward: dict[int, fx.Node] = {}
    # later nodes with the same number have no separate autograd function
    for node in graph.nodes:
        if "seq_nr" in node.meta and not label_of(node).backward:
            forward.setdefault(node.meta["seq_nr"], node)
    numbers, differentiated = sorted(forward), {}
    for node in graph.nodes:
        if label_of(node).backward and marks(node).get(_DEPTH) and "seq_nr" in node.meta:
            at = bisect.bisect_left(numbers, node.meta["seq_nr"])
            if at < len(numbers):
                differentiated[node] = forward[numbers[at]]
    return differentiated
