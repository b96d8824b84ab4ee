"""``autocast`` of releases 2.0 to 3.0. Source: spec/ops.md section 11."""

from __future__ import annotations

import functools

import torch

from .._base import log


def autocast(enabled: bool = True) -> torch.autocast:
    """Let convolutions and matrix products run in half, within a block or a decorated function.

    Kept for old scripts: it is ``torch.autocast`` with float16, and torch's own lists of operators
    decide what is cast. Source: spec/ops.md section 11.

    Args:
        enabled: False to switch it off within the block.
    """
    _say_once()
    # Casts are part of the captured program; none may be kept for the next capture.
    return torch.autocast("cpu", dtype=torch.float16, enabled=enabled, cache_enabled=False)


@functools.cache
def _say_once() -> None:
    log.python.warning(
        "poptorch.autocast is kept for scripts of old releases: it is torch.autocast with float16."
    )
