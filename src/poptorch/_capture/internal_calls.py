"""Pass traced tensors also to the parts of torch that accept tensors without asking a
function mode.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._base import private
from .._base.thread_safety import by_thread
from .parameter_identity import TracedTensors, overrides
from .recorded import recorded
from .replaced_tensors import Replacement, changed

On = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def passing_traced_tensors(held: TracedTensors, on: On) -> Iterator[None]:
    """Intercept these parts within the block.

    ``on`` makes the context for user code that a backward pass in ``forward`` calls.
    """

    def backward(usual: Any, t_outputs: Any, *args: Any, **named: Any) -> Any:
        with on():
            return usual(held.traced(t_outputs), *held.traced(args), **held.traced(named))

    def wrapped(usual: Any, maybe_tensor: Any, level: int) -> Any:
        return usual(held.traced(maybe_tensor), level)

    def batched(usual: Any, flat_in_dims: Any, flat_args: Any, *rest: Any) -> Any:
        return usual(flat_in_dims, held.traced(list(flat_args)), *rest)

    replacements = {
        "engine_run_backward": _only_in_this_thread(backward),
        "wrap_tensor_for_grad": _only_in_this_thread(wrapped),
        "create_batched_inputs": _only_in_this_thread(batched),
    }
    with changed(list(_changes(held))), private.replacing(replacements):
        yield


def _only_in_this_thread(replacement: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(replacement)
    def chosen(usual: Any, *args: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return usual(*args, **named)
        return replacement(usual, *args, **named)

    return chosen


def _changes(held: TracedTensors) -> Iterator[Replacement]:
    def given(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(own: Any, *args: Any, **named: Any) -> Any:
            return held.users(usual(own, *held.traced(args), **held.traced(named)))

        return by_thread(call, usual)

    function = torch.autograd.Function
    apply = vars(function)["apply"]  # written in Python or, since torch 2.15, in C++

    def usual_apply(cls: Any, *args: Any, **named: Any) -> Any:
        return apply.__get__(None, cls)(*args, **named)

    yield function, "apply", classmethod(given(usual_apply))

    def as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
        traced = held.traced(tensor)
        if recorded(traced) is None:
            return usual_as(tensor, cls)
        alias = traced.view_as(traced)
        return held.as_class(cls, alias) if overrides(cls) else alias

    def make_subclass(
        cls: type[torch.Tensor],
        data: torch.Tensor,
        require_grad: bool = False,
        *rest: Any,
        **named: Any,
    ) -> Any:
        traced = held.traced(data)
        if traced is data:  # also applies to each tensor without values that torch makes
            return usual_make(cls, data, require_grad, *rest, **named)
        made: torch.Tensor = traced.detach().requires_grad_(require_grad)
        if issubclass(cls, nn.Parameter):
            made._is_param = True
        return held.as_class(cls, made) if overrides(cls) else made

    usual_as, usual_make = torch.Tensor.as_subclass, private.optional("make_subclass")
    yield torch.Tensor, "as_subclass", by_thread(as_subclass, usual_as)
    if usual_make is not None:
        yield torch.Tensor, "_make_subclass", staticmethod(by_thread(make_subclass, usual_make))
