"""Intercept the calls of torch's functions in ``forward``, so that a capture records the
operators.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, resolve_name

from .._base import nested_values, private, source
from .._base.errors import Error
from .._ir.spec import Precision
from .._ops.context import Candidate, Capture, listening, outermost
from . import dynamic_slices, inner_gradients, recorded_hints, trace
from .casting import Casting
from .kept_outside_model import TensorsKeptOutside
from .losses import LOSS_FUNCTIONS
from .moving_views import MovingViews
from .parameter_identity import TracedTensors
from .recorded import assign_data, recorded, suspended_outer_tracing
from .recorded_draws import Draws
from .replaced_functions import RECURRENT, recurrent, substitutes
from .replaced_tensors import changed
from .torch_control_flow import refuse_writes, replacement
from .value_reads import QUESTIONS, Frozen, ValueReads
from .written_constants import ValuesOfConstants

# Scripts for PopTorch's last releases say on which device masks and constants should be.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IPU, _DEVICE = re.compile(r"ipu(:\d+)?"), torch.device("cpu")  # the device of traced tensors


@dataclass(eq=False)
class CaptureContext(Capture):
    stochastic: bool = False  # whether the program rounds to float16 at random
    reads: ValueReads = field(default_factory=ValueReads)
    held: TracedTensors = field(default_factory=TracedTensors)
    draws: Draws = field(default_factory=Draws)
    views: MovingViews = field(default_factory=MovingViews)
    outside: TensorsKeptOutside = field(default_factory=TensorsKeptOutside)
    constants: ValuesOfConstants = field(default_factory=ValuesOfConstants)
    # lines of assignments to ``.data``, by tensor
    assigned: dict[int, str | None] = field(default_factory=dict)

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        super().mark_loss(self.held.traced(loss), name)

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments and keyword arguments that an operator gets."""
        args, kwargs = self.held.caught(func, args, kwargs)
        self.constants.about_to_run(func, args, kwargs)
        self.views.heard(func, args, kwargs)
        return args, kwargs

    def identify(self, tensor: torch.Tensor) -> int | None:
        node = recorded(outermost(self.held.traced(tensor)))
        return None if node is None else list(node.graph.nodes).index(node)

    def assign_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if recorded(target) is None and recorded(value) is not None:
            raise Error(
                "forward assigns to .data of a tensor that is neither a parameter nor a buffer",
                got=f"a tensor of shape {tuple(target.shape)}, which is a constant of the program",
                fix="register the tensor in __init__: self.register_buffer('name', tensor)",
            )
        self.assigned[id(target)] = source.calling_line()
        assign_data(target, value)

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
            recorded_hints.lower(graph, (), (), self.groups)

        own_groups = changed([(self, "groups", {})])
        with own_groups, suspended_outer_tracing(), private.disable_proxy_modes_tracing():
            with trace.mode_of(inputs):
                examples = [torch.empty_like(tensor) for tensor in inputs]

            def run(flat: list[torch.Tensor]) -> list[torch.Tensor]:
                with self.draws.in_body():
                    return function(*flat)

            return trace.trace(run, examples, edit, stochastic=self.stochastic)


class Overrides(TorchFunctionMode):
    """Changes the arguments of torch's functions, or replaces them, while forward is captured."""

    def __init__(self, context: CaptureContext, precision: Precision, priced: bool) -> None:
        super().__init__()
        self._context, self._priced = context, priced
        self._casting = Casting(precision)
        self._in_function = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The mode is off while a function runs, because functions that it calls are torch's own.
        outer, self._in_function = self._in_function, True
        try:
            return self._answer(func, args, kwargs or {})
        except Error as refusal:
            self._context.reads.note_refusal(refusal)
            raise
        finally:
            self._in_function = outer

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = self._context.held
        if held.has_classes and private.is_torch_function_enabled():
            for kind in held.classes(args, kwargs):
                of_class: Any = kind.__torch_function__
                with self.on():
                    result = of_class(func, (kind,), args, kwargs)
                if result is not NotImplemented:
                    return result
        given = {name: self._given(value) for name, value in kwargs.items()}
        args = tuple(map(self._given, args))
        self._context.views.before(*args, *given.values())
        result = self._called(func, args, given)
        self._context.views.after()
        self._context.outside.note_result(result)
        return held.users(result)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Run user code within the block, also user code that is called by a torch function."""
        if not self._in_function:
            yield
            return
        self._in_function = False
        try:
            with self:
                yield
        finally:
            self._in_function = True

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loss, called = LOSS_FUNCTIONS.get(func) if self._context.training else None, func
        func, args, kwargs = self._casting(func, args, kwargs)
        if func is torch.autograd.grad:
            inner_gradients.check(self._context, args[0] if args else kwargs["outputs"])
        operator = replacement(func)
        if operator is not None:
            result = operator(self._context, self._within, *args, **kwargs)
        elif func == _SET_DATA:
            self._context.assign_data(*args)
            result = None
        elif func in QUESTIONS:
            result = self._context.reads.answer(func, args, kwargs)
        elif func in dynamic_slices.FUNCTIONS:
            result = dynamic_slices.FUNCTIONS[func](self._context.views, *args, **kwargs)
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
            self._context.differentiated += map(outermost, nested_values.flatten(outputs)[0])
        return result

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.on():
                return function(*args, **kwargs)

        return run

    def _note_end(self, function: Any, args: tuple[Any, ...], result: torch.Tensor) -> None:
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
            node = recorded(result)
            if node is not None:
                end = Candidate(result, resolve_name(function) or "", source.calling_line())
                self._context.ends[node] = end

    def _given(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._context.held.traced(value)
        if isinstance(value, (str, torch.device)):
            return _DEVICE if _IPU.fullmatch(str(value)) else value
        if isinstance(value, Frozen):
            return self._context.reads.computed_with(value)
        if type(value) is slice:
            return slice(*map(self._given, (value.start, value.stop, value.step)))
        if type(value) in (list, tuple):
            return type(value)(map(self._given, value))
        if type(value) is dict:
            return {key: self._given(item) for key, item in value.items()}
        return value
