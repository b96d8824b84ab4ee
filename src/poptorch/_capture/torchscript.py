"""Support calls of TorchScript in ``forward``, whose interpreter replaces all exceptions by its
own.

If a script reads the value of a boolean tensor, it branches on that value. If it reads any other
number, it computes with the number, and the program would use the number of the first inputs for
all inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._base import private
from .parameter_identity import TracedTensors
from .value_reads import ValueReads


@contextlib.contextmanager
def followed(reads: ValueReads, held: TracedTensors) -> Iterator[None]:
    """Pass traced tensors to scripts within the block, and raise exceptions from answering their
    questions.

    Both apply to this thread only.
    """
    thread = threading.get_ident()

    def call(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return usual(*args, **kwargs)
        args, kwargs = held.traced(args), held.traced(kwargs)
        with reads.by_script() as raised:
            try:
                return held.users(usual(*args, **kwargs))
            except RuntimeError:
                if raised:
                    raise raised[0] from None
                raise

    kinds = (torch.jit.ScriptFunction, private.optional("ScriptMethod"))
    with contextlib.ExitStack() as stack:
        for kind in filter(None, kinds):
            stack.enter_context(private.replaced(kind, "__call__", call))
        yield
