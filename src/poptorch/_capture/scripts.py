"""Calls of TorchScript in ``forward``: its interpreter turns every exception into its own.

What such a call asks of a tensor's value is a branch if the tensor holds truth values. A script
computes with any other number that it reads, which would stay what it was for the first inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._base import private
from .held import Held
from .value_reads import ValueReads


@contextlib.contextmanager
def followed(reads: ValueReads, held: Held) -> Iterator[None]:
    """Within the block scripts get traced tensors, and raise what answering their questions raised.

    Both in this thread only.
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
