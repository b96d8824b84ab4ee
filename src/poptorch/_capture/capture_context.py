"""What ``forward`` calls: how a capture hears of operators, and what torch's functions compute."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, resolve_name

from .._base import private, source, trees
from .._ir.spec import Precision
from .._ops.context import Candidate, Capture, listening, outermost
from . import marks, trace
from .casting import Casting
from .higher_order import refuse_writes, stand_in
from .losses import LOSS_FUNCTIONS
from .recorded import recorded, surroundings_waiting
from .replaced import ModelTensor, changed
from .substitutes import RECURRENT, recurrent, substitutes
from .value_reads import QUESTIONS, Frozen, ValueReads

# Scripts of PopTorch's last releases say where masks and constants are to be.
_IPU, _DEVICE = re.compile(r"ipu(:\d+)?"), torch.device("cpu")  # of what is traced


@dataclass(eq=False)
class CaptureContext(Capture):
    stochastic: bool = False  # the program rounds to float16 at random
    reads: ValueReads = field(default_factory=ValueReads)

    def identify(self, tensor: torch.Tensor) -> int | None:
        node = recorded(outermost(tensor))
        return None if node is None else list(node.graph.nodes).index(node)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with trace.untraced(), listening(None):
            yield

    def body(
        self,
        function: Callable[..., list[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        keeps_inputs: bool = False,
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        def edit(graph: fx.Graph) -> None:
            refuse_writes(graph, to_inputs=keeps_inputs)
            marks.lower(graph, (), (), self.groups)

        own_groups = changed([(self, "groups", {})])
        with own_groups, surroundings_waiting(), private.disable_proxy_modes_tracing():
            with trace.mode_of(inputs):
                examples = [torch.empty_like(tensor) for tensor in inputs]
            return trace.trace(
                lambda flat: function(*flat), examples, edit, stochastic=self.stochastic
            )


class Overrides(TorchFunctionMode):
    """Traced tensors take the place of those that lists and closures of forward hold."""

    def __init__(
        self,
        context: CaptureContext,
        places: Mapping[str, ModelTensor],
        values: Mapping[str, torch.Tensor],
        precision: Precision,
        priced: bool,
    ) -> None:
        super().__init__()
        self._context, self._priced = context, priced
        self._traced = {id(tied.tensor): values[path] for path, tied in places.items()}
        self._casting = Casting(precision)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The mode is off while the function runs: functions inside functions are torch's own.
        args = tuple(map(self._traced_of, args))
        kwargs = {name: self._traced_of(value) for name, value in (kwargs or {}).items()}
        loss, called = LOSS_FUNCTIONS.get(func) if self._context.training else None, func
        func, args, kwargs = self._casting(func, args, kwargs)
        operator = stand_in(func)
        if operator is not None:
            result = operator(self._context, self._within, *args, **kwargs)
        elif func in QUESTIONS:
            result = self._context.reads.answer(func, args, kwargs)
        elif func in RECURRENT and not kwargs:
            result = recurrent(func, args, self._priced)
        else:
            result = substitutes().get(func, func)(*args, **kwargs)
        if self._context.training and isinstance(result, torch.Tensor):
            if loss is not None:
                self._context.mark_loss(result, loss)
            if not result.requires_grad:
                self._note_end(called, args, result)
        elif func is torch.autograd.grad:
            outputs = args[0] if args else kwargs["outputs"]
            self._context.differentiated += map(outermost, trees.flatten(outputs)[0])
        return result

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    def _note_end(self, function: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
            node = recorded(result)
            if node is not None:
                end = Candidate(result, resolve_name(function) or "", source.calling_line())
                self._context.ends[node] = end

    def _traced_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._traced.get(id(value), value)
        if isinstance(value, (str, torch.device)):
            return _DEVICE if _IPU.fullmatch(str(value)) else value
        if isinstance(value, Frozen):
            return self._context.reads.computed_with(value)
        if type(value) is slice:
            return slice(*map(self._traced_of, (value.start, value.stop, value.step)))
        if type(value) in (list, tuple):
            return type(value)(map(self._traced_of, value))
        return value
