"""Whether the code at hand is being captured for the device."""

from __future__ import annotations

from .._ops.context import listener


def isRunningOnIpu() -> bool:
    """Return True while an executor captures ``forward``, False everywhere else.

    Source: PopTorch user guide, "Features".
    """
    return listener() is not None
