"""What torch puts around parts of forward and a program has no use for: captured without it."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, checkpoint

from .._base import private


@contextlib.contextmanager
def seen_through(again: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Within the block compiled functions run as they were written, checkpoints are the newer."""
    over, thread = False, threading.get_ident()

    def checkpointed(
        usual: Callable[..., Any],
        fn: Callable[..., Any],
        preserve_rng_state: bool,
        context_fn: Any,
        determinism_check: str,
        debug: bool,
        early_stop: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with again() if over else contextlib.nullcontext():
                return fn(*args, **kwargs)

        chosen = run if threading.get_ident() == thread else fn
        rest = (preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args)
        return usual(chosen, *rest, **kwargs)

    stand_in = {"checkpoint_without_reentrant_generator": checkpointed}
    try:
        with private.standing_in(stand_in), _never_reentrant(), _inlined():
            yield
    finally:
        over = True


@contextlib.contextmanager
def _never_reentrant() -> Iterator[None]:
    before = dict(vars(CheckpointFunction))
    CheckpointFunction.apply = staticmethod(_newer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if "apply" in before:
            CheckpointFunction.apply = before["apply"]  # type: ignore[method-assign]
        else:
            del CheckpointFunction.apply  # the one that it inherits is there again


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        yield
        return
    with private.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
        # Hooks that listen to all modules are called for the wrapper, too: once more is no harm.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        yield


def _newer(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
