"""What torch puts around parts of forward and a program has no use for: captured without it.

A program is compiled as a whole, so that ``torch.compile`` inside of it adds nothing. Torch's older
checkpoints ("reentrant") start a backward pass inside of the one that is captured, which torch
refuses; the newer ones compute the same. Source: PyTorch documentation, "torch.compile" and
"torch.utils.checkpoint".
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, checkpoint

from .._base import private


@contextlib.contextmanager
def seen_through() -> Iterator[None]:
    """Within the block compiled functions run as they were written, checkpoints are the newer."""
    CheckpointFunction.apply = staticmethod(_newer)  # type: ignore[method-assign]
    try:
        with _inlined():
            yield
    finally:
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
